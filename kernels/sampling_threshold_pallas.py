"""`sampling.find_threshold` for NVIDIA GPUs in Pallas (Triton lowering): exact, without a sort, in few reads.

The first pass of sampling kept the largest logit of each group of 128. The k-th largest of those is a lower bound of
the k-th largest logit, and where the largest of some groups alone have the mass that top_p asks for, the least of
them is one of its threshold: `_list_kernel` finds this floor, and lists the groups that reach it, the only ones that
are read from then on.

A search, for a count (top_k) or a mass (top_p), has two kernels. `_collect_kernel` copies the logits of a bracket
around the threshold into a short list; while they are too many, it narrows the bracket by a pass over the listed
groups, which sums up what is above each of `WAYS` - 1 candidates. `_choose_kernel` bisects the list, in the integers
that order like the floats. A row with both filters is searched for its count first; what that collected usually
serves for the mass as well, and else a second round collects again.

Each sum has an order of its own (lanes, then a tree), given by the tile sizes below and not by the batch.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.kernels.choice import Choice
from jaxllm.kernels.gumbel import GROUP
from jaxllm.kernels.ordered_bits import LOWEST, order_bits, unorder_bits
from jaxllm.kernels.sampling_parts import Launch, Parts, load_logits, traced_once

CAPACITY = 8192
"""Logits that can be collected of a row: they fit into the registers of a program."""
WAYS = 8
"""Parts into which a pass cuts its bracket."""
TURNS_BY_VALUE = 4
"""Passes that cut the bracket into equal parts of numbers, which suits logits; later ones cut it into equal parts of
bits, which ends."""
SPANS = 3
"""Of noise that is normally distributed, the groups' largest reach over a third of what all numbers do."""
UNROLL = 4
"""Tiles that are loaded before one is used."""

LIST = Launch(0, 0, 4)
NARROW_TILE = 8
COLLECT = Launch(0, 32, 8)
CHOOSE = Launch(0, 0, 8)

NOTHING, COUNT, MASS = 0, 1, 2
"""What a row is searched for."""


class Groups(NamedTuple):
    """Where to look."""

    listed: Int[Array, "rows groups"]
    """The groups of a row that reach its floor come first."""
    counts: Int[Array, " rows"]
    """How many those are."""
    spans: Float[Array, " rows"]
    """From the peak to the least of the largest logits: how wide a row is, roughly."""


class Search(NamedTuple):
    """What is wanted of each row: the largest t in [low, peak] such that what is not below it has the target's weight."""

    kind: Int[Array, " rows"]
    low: UInt32[Array, " rows"]
    """What is found if no t has."""
    target: Float[Array, " rows"]


class Collected(NamedTuple):
    """The logits in a bracket around each row's threshold."""

    members: Float[Array, "rows capacity"]
    """The first `num_members` are set."""
    num_members: Int[Array, " rows"]
    """More than the capacity only if the bracket is a single number."""
    low: UInt32[Array, " rows"]
    high: UInt32[Array, " rows"]
    above: Float[Array, " rows"]
    """Weight of what is above the bracket, of the kind that is searched for."""
    mass_above: Float[Array, " rows"]
    """Of a row that is searched for a count and then for a mass."""
    mass_kept: Float[Array, " rows"]
    """Likewise: of what is not below the bracket; set if there is something above it."""


@traced_once
def find_threshold(logits, peak, parts: Parts, inverse_temperature, choice: Choice, *, interpret: bool = False):
    """See `sampling.find_threshold`."""
    vocab = logits.shape[1]
    # The mass that min_p leaves is not known before it was summed up, as that of a count's tokens is.
    sums_up = (choice.top_k == 0) & (choice.least > -jnp.inf) & (choice.top_p < 1)
    choice = choice._replace(top_k=jnp.where(sums_up, vocab, choice.top_k))
    call = partial(pl.pallas_call, grid=(len(logits),), interpret=interpret)
    groups, floor = _list_groups(call, vocab, peak, parts, inverse_temperature, choice)
    counts_first = choice.top_k > 0
    search = Search(
        jnp.where(counts_first, COUNT, jnp.where(choice.top_p < 1, MASS, NOTHING)),
        floor,
        jnp.where(counts_first, choice.top_k.astype(jnp.float32), choice.top_p * parts.mass),
    )
    others = (peak, inverse_temperature, choice.top_p)

    def one_round(_, search: Search) -> Search:
        return _choose(call, _collect(call, logits, groups, search, others), search, others)

    # As a loop the interpreter compiles a round once.
    search = jax.lax.fori_loop(0, 2, one_round, search, unroll=not interpret)
    return unorder_bits(search.low)


def _list_groups(call, vocab: int, peak, parts: Parts, inverse_temperature, choice: Choice):
    rows, num_groups = parts.maxima.shape
    listed, counts, spans, floors = call(
        partial(_list_kernel, num_groups=num_groups, num_whole=vocab // GROUP),
        out_shape=[
            jax.ShapeDtypeStruct((rows, num_groups), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.uint32),
        ],
        compiler_params=LIST.params,
        name="list_groups",
    )(parts.maxima, peak, parts.mass, inverse_temperature, *choice)
    return Groups(listed, counts, spans), floors


def _list_kernel(
    maxima, peaks, masses, inverse_temperature, top_k, top_p, least, listed, counts, spans, floors,
    *, num_groups: int, num_whole: int,
):  # fmt: skip
    """Bounds a row's threshold from below, and lists the groups that reach the bound."""
    row = pl.program_id(0)
    count, share = top_k[row], top_p[row]
    lowest = jnp.maximum(order_bits(least[row]), LOWEST)
    floors[row] = lowest
    counts[row], spans[row] = 0, 0.0

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

        floor = jnp.maximum(jax.lax.fori_loop(0, 32, narrow, jnp.uint32(0)), lowest)
        reaches = exists & (order >= floor)
        num_before = jnp.cumsum(reaches.astype(jnp.int32)) - reaches.astype(jnp.int32)
        num_reaching = jnp.sum(reaches.astype(jnp.int32))
        # The others behind them: no two stores meet.
        place = jnp.where(reaches, num_before, num_reaching + group - num_before)
        plt.store(listed.at[row, place], group, mask=exists)
        counts[row] = num_reaching
        floors[row] = floor
        spans[row] = peaks[row] - jnp.min(jnp.where(group < num_whole, values, peaks[row]))


def _collect(call, logits, groups: Groups, search: Search, others) -> Collected:
    rows, vocab = logits.shape
    floats, bits = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.uint32))
    members, count = jax.ShapeDtypeStruct((rows, CAPACITY), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    outputs = call(
        partial(_collect_kernel, vocab=vocab),
        out_shape=[members, count, bits, bits, floats, floats, floats],
        compiler_params=COLLECT.params,
        name="collect_logits",
    )(logits, *groups, *search, *others)
    return Collected(*outputs)


def _collect_kernel(
    logits, listed, counts, spans, kinds, lows, targets, peaks, inverse_temperature, top_p,
    members, num_members, out_lows, out_highs, aboves, masses_above, masses_kept, *, vocab: int,
):  # fmt: skip
    row = pl.program_id(0)
    kind, target, peak, scale = kinds[row], targets[row], peaks[row], inverse_temperature[row]
    num_listed = jnp.where(kind == NOTHING, 0, counts[row])

    def load_groups(first, tile: int):
        """A tile of the listed groups, from the one at place `first` on: logits, and whether they are any."""
        place = first + jnp.arange(tile)
        group = plt.load(listed.at[row, place], mask=place < num_listed, other=0)
        column = group[:, None] * GROUP + jnp.arange(GROUP)[None, :]
        exists = (place < num_listed)[:, None] & (column < vocab)
        return load_logits(logits, row, column, exists), exists

    def weights_above(candidates, by_mass) -> list[Array]:
        """The weights of the listed logits that are not below each candidate: one each, or their masses."""

        def one_tile(index, sums):
            first = index * (NARROW_TILE * UNROLL)
            for values, exists in [load_groups(first + part * NARROW_TILE, NARROW_TILE) for part in range(UNROLL)]:
                order = order_bits(values)
                weights = jnp.where(by_mass, jnp.exp((values - peak) * scale), 1.0)
                weights = jnp.where(exists, weights, 0.0)
                sums = tuple(
                    total + jnp.where(order >= candidate, weights, 0.0)
                    for total, candidate in zip(sums, candidates, strict=True)
                )
            return sums

        empty = (jnp.zeros((NARROW_TILE, GROUP), jnp.float32),) * len(candidates)
        sums = jax.lax.fori_loop(0, pl.cdiv(num_listed, NARROW_TILE * UNROLL), one_tile, empty)
        return [jnp.sum(total) for total in sums]

    def narrow(turn, low, high, above):
        """The part of the bracket that has the threshold, and the weight of what is above it."""
        candidates = _cut(turn, low, high, spans[row])
        new_low, new_high = low, high
        for candidate, weight in zip(candidates, weights_above(candidates, kind == MASS), strict=True):
            reached = weight >= target
            new_low = jnp.where(reached, jnp.maximum(new_low, candidate), new_low)
            new_high = jnp.where(reached, new_high, jnp.minimum(new_high, candidate - jnp.uint32(1)))
            above = jnp.where(reached, above, jnp.maximum(above, weight))
        return new_low, new_high, above

    def collect(low, high):
        """Copies the logits of the bracket, and counts them: no further than needed to see that they are too many."""

        def one_tile(carry):
            first, total = carry
            values, exists = load_groups(first, COLLECT.tile)
            order = order_bits(values)
            is_member = exists & (order >= low) & (order <= high)
            ones = is_member.astype(jnp.int32)
            of_groups = jnp.sum(ones, axis=1)
            before = jnp.cumsum(of_groups) - of_groups
            # One place for each, and one past the end for all others.
            place = jnp.where(is_member, total + before[:, None] + jnp.cumsum(ones, axis=1) - 1, CAPACITY)
            plt.store(members.at[row, place], values, mask=place < CAPACITY)
            return first + COLLECT.tile, total + jnp.sum(of_groups)

        start = jnp.int32(0), jnp.int32(0)
        return jax.lax.while_loop(lambda carry: (carry[0] < num_listed) & (carry[1] <= CAPACITY), one_tile, start)[1]

    def attempt(carry):
        turn, low, high, above, _ = carry
        low, high, above = jax.lax.cond(
            turn > 0, lambda: narrow(turn - 1, low, high, above), lambda: (low, high, above)
        )  # fmt: skip
        return turn + 1, low, high, above, collect(low, high)

    low = lows[row]
    high = jnp.where(kind == NOTHING, low, jnp.maximum(order_bits(peak), low))
    turns, low, high, above, total = jax.lax.while_loop(
        lambda carry: (carry[4] > CAPACITY) & (carry[1] < carry[2]) | (carry[0] == 0),
        attempt,
        (jnp.int32(0), low, high, jnp.float32(0), jnp.int32(0)),
    )
    needs_mass = (kind == COUNT) & (top_p[row] < 1) & (turns > 1)
    ends = [low, high + jnp.uint32(1)]
    # Where the bracket was not narrowed, nothing is above it, of either kind.
    mass_kept, mass_above = jax.lax.cond(needs_mass, lambda: tuple(weights_above(ends, True)), lambda: (above, above))
    num_members[row] = total
    out_lows[row], out_highs[row] = low, high
    aboves[row], masses_above[row], masses_kept[row] = above, mass_above, mass_kept


def _cut(turn, low, high, span) -> list[Array]:
    """Candidates inside a bracket of two numbers or more, in no order; the least one is always there.

    The first turns take the numbers below the bracket's end, no farther than a few spans: where the bracket begins,
    at -inf for example, says nothing of where the logits are.
    """
    first = low + jnp.uint32(1)
    step = (high - low) // jnp.uint32(WAYS) + jnp.uint32(1)
    end = unorder_bits(high)
    reach = SPANS * span * (jnp.int32(1) << (2 * jnp.minimum(turn, TURNS_BY_VALUE))).astype(jnp.float32)
    start = jnp.maximum(unorder_bits(low), end - reach)
    width = end - start
    by_value = (turn < TURNS_BY_VALUE) & (width < jnp.inf)
    candidates = [first]
    for part in range(1, WAYS - 1):
        value = order_bits(start + width * jnp.float32(part / (WAYS - 1)))
        bits = jnp.minimum(jnp.uint32(part) * step, high - low) + low
        candidates.append(jnp.minimum(jnp.maximum(jnp.where(by_value, value, bits), first), high))
    return candidates


def _choose(call, collected: Collected, search: Search, others) -> Search:
    rows = len(search.kind)
    shapes = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.uint32, jnp.float32)]
    outputs = call(_choose_kernel, out_shape=shapes, compiler_params=CHOOSE.params, name="choose_threshold")(
        *collected, search.kind, search.target, *others
    )
    return Search(*outputs)


def _choose_kernel(
    members, num_members, lows, highs, aboves, masses_above, masses_kept, kinds, targets,
    peaks, inverse_temperature, top_p, out_kinds, out_lows, out_targets,
):  # fmt: skip
    """Finds the threshold among what was collected; says what is left to search for."""
    row = pl.program_id(0)
    kind, share, peak, top = kinds[row], top_p[row], peaks[row], order_bits(peaks[row])
    low, high, total = lows[row], highs[row], num_members[row]
    out_kinds[row], out_lows[row], out_targets[row] = NOTHING, low, 0.0

    @pl.when(kind != NOTHING)
    def _():
        place = jnp.arange(CAPACITY)
        exists = (place < total) & (total <= CAPACITY)
        values = plt.load(members.at[row, place], mask=exists, other=-jnp.inf)
        order = order_bits(values)
        mass = jnp.where(exists, jnp.exp((values - peak) * inverse_temperature[row]), 0.0)
        ones = exists.astype(jnp.float32)

        def search(low, high, above, target, weights):
            """The largest t in [low, high] such that what is not below it has the target's weight; else `low`."""

            def halve(bracket):
                low, high = bracket
                middle = low + (high - low) // jnp.uint32(2) + jnp.uint32(1)
                reached = above + jnp.sum(jnp.where(order >= middle, weights, 0.0)) >= target
                return jnp.where(reached, middle, low), jnp.where(reached, high, middle - jnp.uint32(1))

            return jax.lax.while_loop(lambda bracket: bracket[0] < bracket[1], halve, (low, high))[0]

        found = search(low, high, aboves[row], targets[row], jnp.where(kind == COUNT, ones, mass))
        kept = masses_above[row] + jnp.sum(jnp.where(order >= found, mass, 0.0))
        target = share * jnp.where(total <= CAPACITY, kept, masses_kept[row])
        is_next = (kind == COUNT) & (share < 1) & (found < top)
        is_here = is_next & (high == top)
        out_kinds[row] = (is_next & (high < top)).astype(jnp.int32) * MASS
        out_lows[row] = search(found, jnp.where(is_here, top, found), 0.0, target, mass)
        out_targets[row] = target
