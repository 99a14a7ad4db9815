"""The operations of `sampling` for NVIDIA GPUs in Pallas (Triton lowering).

A row is cut into groups of 128 tokens, and those into chunks, one a program. The first pass over the logits
keeps each group's largest. The k-th largest of those is a lower bound of the k-th largest logit, and where the
largest of some groups alone have the mass that top_p asks for, the least of them is one of its threshold: so
the groups that can hold a threshold, or anything above it, are known without a second look at the logits.
Usually they are few. The search narrows a bracket around the threshold by a factor of `WAYS` per pass over
them, in the integers that order like the floats. The last pass computes noise only where a token is kept.

Each sum has an order of its own (lanes, then a tree), given by the tile sizes below and not by the batch.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jaxllm.kernels.gumbel import GROUP, HALF, gumbel_pair
from jaxllm.kernels.ordered_bits import LOWEST, order_bits, unorder_bits

traced_once = partial(jax.jit, static_argnames="interpret")
"""The branches of a step share what is traced and lowered: each is a second's work of the host."""

WAYS = 8
"""Parts into which a pass of the search cuts its bracket."""


class Launch(NamedTuple):
    """How a kernel is run; found by tuning."""

    chunk: int
    """Groups of a program; of no meaning to the search, whose program owns a row."""
    tile: int
    """Groups that are taken at once."""
    num_warps: int

    @property
    def params(self) -> plt.CompilerParams:
        return plt.CompilerParams(num_warps=self.num_warps, num_stages=1)


SUMMARIZE = Launch(64, 64, 8)
LIST = Launch(0, 0, 4)
SEARCH = Launch(0, 16, 8)
DRAW = Launch(64, 16, 8)


def _load(logits, row, column, mask) -> Array:
    """Logits as float32, whatever the model computes in."""
    return plt.load(logits.at[row, column], mask=mask, other=-jnp.inf).astype(jnp.float32)


class Parts(NamedTuple):
    """What the first pass keeps."""

    maxima: Float[Array, "rows groups"]
    """The largest logit of each group."""
    mass: Float[Array, " rows"]
    """Sum of the exponentials at the temperature, relative to the peak."""


@traced_once
def summarize(logits, inverse_temperature, *, interpret: bool = False):
    """See `sampling.summarize`."""
    rows, vocab = logits.shape
    num_groups = pl.cdiv(vocab, GROUP)
    num_chunks = pl.cdiv(num_groups, SUMMARIZE.chunk)
    of_chunks = jax.ShapeDtypeStruct((rows, num_chunks), jnp.float32)
    maxima, peaks, places, totals, masses = pl.pallas_call(
        partial(_summarize_kernel, vocab=vocab, launch=SUMMARIZE),
        out_shape=[
            jax.ShapeDtypeStruct((rows, num_chunks * SUMMARIZE.chunk), jnp.float32),
            of_chunks,
            jax.ShapeDtypeStruct((rows, num_chunks), jnp.int32),
            of_chunks,
            of_chunks,
        ],
        grid=(num_chunks, rows),
        compiler_params=SUMMARIZE.params,
        interpret=interpret,
        name="summarize_logits",
    )(logits, inverse_temperature)
    peak, most_likely = _best_of_chunks(peaks, places)
    relative = peaks - peak[:, None]
    log_total = peak + jnp.log(_add_chunks(totals * jnp.exp(relative)))
    mass = _add_chunks(masses * jnp.exp(relative * inverse_temperature[:, None]))
    return peak, most_likely, log_total, Parts(maxima, mass)


def _summarize_kernel(
    logits, inverse_temperature, maxima, peaks, places, totals, masses, *, vocab: int, launch: Launch
):  # fmt: skip
    chunk, row = pl.program_id(0), pl.program_id(1)
    group = chunk * launch.chunk + jnp.arange(launch.chunk)
    column = group[:, None] * GROUP + jnp.arange(GROUP)[None, :]
    values = _load(logits, row, column, column < vocab)
    largest = values.max(axis=1)
    maxima[row, group] = largest
    peaks[row, chunk] = peak = largest.max()
    places[row, chunk] = jnp.min(jnp.where(values == peak, column, vocab))
    relative = values - jnp.where(peak == -jnp.inf, 0.0, peak)
    totals[row, chunk] = jnp.sum(jnp.exp(relative))
    masses[row, chunk] = jnp.sum(jnp.exp(relative * inverse_temperature[row]))


def _best_of_chunks(values: Array, places: Array):
    """The largest of each row, and the first place that has it."""
    best = values.max(axis=1)
    return best, jnp.min(jnp.where(values == best[:, None], places, np.iinfo(np.int32).max), axis=1)


def _add_chunks(columns: Array) -> Array:
    """One after the other: a reduction's order could depend on the number of rows."""
    return reduce(add, jnp.unstack(columns, axis=1))


@traced_once
def find_threshold(logits, peak, parts: Parts, inverse_temperature, top_k, top_p, *, interpret: bool = False):
    """See `sampling.find_threshold`."""
    rows, vocab = logits.shape
    num_groups = parts.maxima.shape[1]
    of_rows = jax.ShapeDtypeStruct((rows,), jnp.int32)
    arguments = (peak, parts.mass, inverse_temperature, top_k, top_p)
    listed, counts, floors = pl.pallas_call(
        partial(_list_kernel, num_groups=num_groups),
        out_shape=[
            jax.ShapeDtypeStruct((rows, num_groups), jnp.int32),
            of_rows,
            jax.ShapeDtypeStruct((rows,), jnp.uint32),
        ],
        grid=(rows,),
        compiler_params=LIST.params,
        interpret=interpret,
        name="list_groups",
    )(parts.maxima, *arguments)
    return pl.pallas_call(
        partial(_search_kernel, vocab=vocab, launch=SEARCH),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        grid=(rows,),
        compiler_params=SEARCH.params,
        interpret=interpret,
        name="find_threshold",
    )(logits, listed, counts, floors, *arguments)


def _list_kernel(
    maxima, peaks, masses, inverse_temperature, top_k, top_p, listed, counts, floors, *, num_groups: int
):  # fmt: skip
    """Bounds a row's threshold from below, and lists the groups that reach the bound."""
    row = pl.program_id(0)
    count, share = top_k[row], top_p[row]
    floors[row] = jnp.uint32(LOWEST)
    counts[row] = 0

    @pl.when((count > 0) | (share < 1))
    def _():
        group = jnp.arange(pl.next_power_of_2(num_groups))
        exists = group < num_groups
        values = plt.load(maxima.at[row, group], mask=exists, other=-jnp.inf)
        mass = jnp.exp((values - peaks[row]) * inverse_temperature[row])
        weights = jnp.where(exists, jnp.where(count > 0, 1.0, mass), 0.0)
        target = jnp.where(count > 0, count.astype(jnp.float32), share * masses[row])
        order = order_bits(values)

        def narrow(bit, found):
            candidate = found | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
            return jnp.where(jnp.sum(jnp.where(order >= candidate, weights, 0.0)) >= target, candidate, found)

        floor = jnp.maximum(jax.lax.fori_loop(0, 32, narrow, jnp.uint32(0)), LOWEST)
        reaches = exists & (order >= floor)
        num_before = jnp.cumsum(reaches.astype(jnp.int32)) - reaches.astype(jnp.int32)
        num_reaching = jnp.sum(reaches.astype(jnp.int32))
        # The others behind them: no two stores meet.
        place = jnp.where(reaches, num_before, num_reaching + group - num_before)
        plt.store(listed.at[row, place], group, mask=exists)
        counts[row] = num_reaching
        floors[row] = floor


def _search_kernel(
    logits, listed, counts, floors, peaks, masses, inverse_temperature, top_k, top_p, out, *, vocab: int, launch: Launch
):
    row = pl.program_id(0)
    peak, scale = peaks[row], inverse_temperature[row]
    num_listed, floor, top = counts[row], floors[row], order_bits(peak)

    def add_up(least, candidates, weigh) -> list[Array]:
        """The weights of the listed groups' logits that are not below `least`, nor below each candidate."""

        def one_tile(tile, sums):
            place = tile * launch.tile + jnp.arange(launch.tile)
            group = plt.load(listed.at[row, place], mask=place < num_listed, other=0)
            column = group[:, None] * GROUP + jnp.arange(GROUP)[None, :]
            exists = (place < num_listed)[:, None] & (column < vocab)
            values = _load(logits, row, column, exists)
            order = order_bits(values)
            weights = jnp.where(exists & (order >= least), weigh(values), 0.0)
            return tuple(
                total + jnp.where(order >= candidate, weights, 0.0)
                for total, candidate in zip(sums, candidates, strict=True)
            )

        empty = (jnp.zeros((launch.tile, GROUP), jnp.float32),) * len(candidates)
        sums = jax.lax.fori_loop(0, pl.cdiv(num_listed, launch.tile), one_tile, empty)
        return [jnp.sum(total) for total in sums]

    def search(least, high, target, weigh):
        """The largest t in [least, high] such that what is not below it has the target's weight; else `least`."""

        def narrow(bracket):
            low, high = bracket
            step = (high - low) // jnp.uint32(WAYS) + jnp.uint32(1)
            candidates = [low + jnp.uint32(part) * step for part in range(1, WAYS)]
            reached = sum((total >= target).astype(jnp.uint32) for total in add_up(least, candidates, weigh))
            low = low + reached * step
            return low, jnp.minimum(high, low + (step - jnp.uint32(1)))

        return jax.lax.while_loop(lambda bracket: bracket[0] < bracket[1], narrow, (least, high))[0]

    def mass(values):
        return jnp.exp((values - peak) * scale)

    count, share = top_k[row], top_p[row]
    lowest = search(floor, jnp.where(count > 0, top, floor), count.astype(jnp.float32), jnp.ones_like)
    total = jax.lax.cond((count > 0) & (share < 1), lambda: add_up(lowest, [lowest], mass)[0], lambda: masses[row])
    nucleus = search(lowest, jnp.where(share < 1, top, lowest), share * total, mass)
    out[row] = unorder_bits(nucleus)


@traced_once
def draw(logits, peak, inverse_temperature, threshold, keys, positions, *, interpret: bool = False):
    """See `sampling.draw`."""
    rows, vocab = logits.shape
    num_chunks = pl.cdiv(pl.cdiv(vocab, GROUP), DRAW.chunk)
    values, places = pl.pallas_call(
        partial(_draw_kernel, vocab=vocab, launch=DRAW),
        out_shape=[
            jax.ShapeDtypeStruct((rows, num_chunks), jnp.float32),
            jax.ShapeDtypeStruct((rows, num_chunks), jnp.int32),
        ],
        grid=(num_chunks, rows),
        compiler_params=DRAW.params,
        interpret=interpret,
        name="draw",
    )(logits, peak, inverse_temperature, threshold, keys, positions)
    return _best_of_chunks(values, places)[1]


def _draw_kernel(
    logits, peaks, inverse_temperature, thresholds, keys, positions, values, places, *, vocab: int, launch: Launch
):
    chunk, row = pl.program_id(0), pl.program_id(1)
    peak, scale, least = peaks[row], inverse_temperature[row], thresholds[row]
    key0, key1, position = keys[row, 0], keys[row, 1], positions[row]
    lane = jnp.arange(HALF)

    def one_tile(tile, best):
        group = chunk * launch.chunk + tile * launch.tile + jnp.arange(launch.tile)
        columns = [group[:, None] * GROUP + offset + lane[None, :] for offset in (0, HALF)]
        halves = [_load(logits, row, column, column < vocab) for column in columns]

        def perturb(best):
            counter = (group[:, None] * HALF + lane[None, :]).astype(jnp.uint32)
            noises = gumbel_pair(key0, key1, position, counter)
            for column, logit, noise in zip(columns, halves, noises, strict=True):
                is_kept = (logit >= least) & (column < vocab)
                value = jnp.where(is_kept, (logit - peak) * scale + noise, -jnp.inf)
                is_better = value > best[0]
                best = jnp.where(is_better, value, best[0]), jnp.where(is_better, column, best[1])
            return best

        return jax.lax.cond(jnp.maximum(*halves).max() >= least, perturb, lambda best: best, best)

    shape = (launch.tile, HALF)
    start = jnp.full(shape, -jnp.inf), jnp.full(shape, vocab, jnp.int32)
    num_tiles = (least < jnp.inf).astype(jnp.int32) * (launch.chunk // launch.tile)
    best, column = jax.lax.fori_loop(0, num_tiles, one_tile, start)
    largest = best.max()
    values[row, chunk] = largest
    places[row, chunk] = jnp.min(jnp.where(best == largest, column, vocab))
