"""The operations of `sampling` for NVIDIA GPUs in Pallas (Triton lowering).

A row is cut into groups of 128 tokens, and those into chunks, one a program. The first pass over the logits
keeps each group's largest, from which `sampling_threshold_pallas` knows where to look for a threshold. The last
pass computes noise only where a token is kept.

Each sum has an order of its own (lanes, then a tree), given by the tile sizes below and not by the batch.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from jaxllm.kernels.gumbel import GROUP, HALF, gumbel_pair
from jaxllm.kernels.sampling_parts import Launch, Parts, load_logits, traced_once
from jaxllm.kernels.sampling_threshold_pallas import find_threshold

__all__ = ["draw", "find_threshold", "summarize", "top_tokens"]

SUMMARIZE = Launch(64, 64, 8)
DRAW = Launch(64, 16, 8)
TOP = Launch(0, 0, 4)


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
    values = load_logits(logits, row, column, column < vocab)
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
        halves = [load_logits(logits, row, column, column < vocab) for column in columns]

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


@partial(jax.jit, static_argnames=("count", "interpret"))
def top_tokens(logits, parts: Parts, count: int, *, interpret: bool = False):
    """See `sampling.top_tokens`."""
    rows, vocab = logits.shape
    return pl.pallas_call(
        partial(_top_kernel, vocab=vocab, num_groups=parts.maxima.shape[1], count=count),
        out_shape=[
            jax.ShapeDtypeStruct((rows, count), jnp.float32),
            jax.ShapeDtypeStruct((rows, count), jnp.int32),
        ],
        grid=(rows,),
        compiler_params=TOP.params,
        interpret=interpret,
        name="top_tokens",
    )(logits, parts.maxima)


def _top_kernel(logits, maxima, values, places, *, vocab: int, num_groups: int, count: int):
    """Takes the best token of the best group, again and again; reads one group of 128 logits for each."""
    row = pl.program_id(0)
    group = jnp.arange(pl.next_power_of_2(num_groups))
    remaining = plt.load(maxima.at[row, group], mask=group < num_groups, other=-jnp.inf)
    lane = jnp.arange(GROUP)

    def take(index, carry):
        remaining, last, last_column = carry
        best = remaining.max()
        chosen = jnp.min(jnp.where(remaining == best, group, num_groups))
        column = chosen * GROUP + lane
        logit = load_logits(logits, row, column, column < vocab)
        # What comes after the token taken last is what was not taken yet.
        is_left = (column < vocab) & ((logit < last) | ((logit == last) & (column > last_column)))
        value = jnp.max(jnp.where(is_left, logit, -jnp.inf))
        place = jnp.min(jnp.where(is_left & (logit == value), column, vocab - 1))
        next_best = jnp.max(jnp.where(is_left & (column != place), logit, -jnp.inf))
        values[row, index] = value
        places[row, index] = place
        return jnp.where(group == chosen, next_best, remaining), value, place

    jax.lax.fori_loop(0, count, take, (remaining, jnp.float32(jnp.inf), jnp.int32(-1)))
