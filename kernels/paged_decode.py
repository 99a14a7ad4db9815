"""Paged attention of rows of one token (decode), split over the context, for NVIDIA GPUs.

It is the same, bit for bit, in a step where other rows have more. A context is cut into splits of a fixed number
of tokens, which are summed up on their own and folded in order, first those of a span of `SPLITS_PER_SPAN`, then
the spans. How many there are, and the order of every
sum, depend on the row alone: whether a program takes a split (little to do: more programs) or a whole span
(fewer partial results) changes no bit. With `Call.invariant` there are no spans: splits are folded one by one, as
the kernel of chunks does it.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from jaxllm.kernels.launches import Launch
from jaxllm.kernels.paged_walk import (
    NEGATIVE,
    Call,
    Context,
    Options,
    Running,
    Shape,
    Walk,
    first_seen,
    merge,
    nothing_seen,
    sink_weight,
)
from jaxllm.kernels.query_tiles import Sizes, cut

MIN_ROWS = 16
"""Rows a matrix product has at the least."""
SPLITS_PER_SPAN = 4
MOST_SPANS_TO_SPLIT = 32
"""A step with up to so many spans has an item per split, a larger one per span: enough for every GPU."""
MIN_PROGRAMS, PROGRAMS_PER_ROW, MAX_PROGRAMS = 64, 4, 1024
"""Programs over work items, per K/V head; each takes every so manieth item. Too many would only start and end."""
PROGRAMS_BESIDE_CHUNKS = 128
"""Programs per K/V head at the least beside chunks, where few rows may be of one token; else as many as rows."""


class Item(NamedTuple):
    """A part of the context of one row. What a program needs to begin, found by one load."""

    token: Int[Array, " items"]
    row: Int[Array, " items"]
    start: Int[Array, " items"]
    """First position of the part."""
    position: Int[Array, " items"]
    """The token's own."""


class DecodeWork(NamedTuple):
    """The parts of the contexts of all rows of one token, one context after the other."""

    ends: Int[Array, " rows"]
    """Items of each row and of all rows before it."""
    splits_per_item: Int[Array, "1"]
    items: Item
    token: Int[Array, " rows"]
    """The row's own, if it has one."""
    tables: Int[Array, "rows max_blocks"]


def prepare(block_tables, kv_lens, cu_q_lens, sizes: Sizes, launch: Launch) -> DecodeWork:
    """Lists the parts of the context of every row that has one token."""
    lengths = jnp.where(cu_q_lens[1:] - cu_q_lens[:-1] == 1, kv_lens, 0)
    longest = block_tables.shape[1] * sizes.block_size
    if sizes.invariant:
        per_item, most = jnp.int32(1), kv_lens.shape[0] * -(-longest // launch.split)
    else:
        num_spans = jnp.sum(-(-lengths // (launch.split * SPLITS_PER_SPAN)))
        per_item = jnp.where(num_spans <= MOST_SPANS_TO_SPLIT, 1, SPLITS_PER_SPAN)
        most = _most_items(kv_lens.shape[0], longest, launch)
    row, start, _, ends = cut(lengths, launch.split * per_item, most)
    items = Item(cu_q_lens[row], row, start, kv_lens[row] - 1)
    return DecodeWork(ends, per_item[None], items, cu_q_lens[:-1], block_tables)


def _most_items(num_rows: int, longest: int, launch: Launch) -> int:
    splits = num_rows * -(-longest // launch.split)
    spans = num_rows * -(-longest // (launch.split * SPLITS_PER_SPAN))
    return max(spans, min(splits, MOST_SPANS_TO_SPLIT * SPLITS_PER_SPAN))


def attend(q, pages_k, pages_v, work: DecodeWork, call: Call, *, beside_chunks: bool = False):
    """Attention of the rows of one token; what it returns for other tokens is of no meaning.

    Args:
        q: [tokens, kv_heads, group, head_dim]; the result is like it.
        pages_k: [slots, kv_heads, head_dim].
        pages_v: likewise.
        work: of `prepare`.
        call: what is static.
        beside_chunks: there may be few rows of one token, or none.
    """
    shape, options, launch, interpret, invariant = call
    num_items, num_rows = work.items.token.shape[0], work.token.shape[0]
    num_programs = max(MIN_PROGRAMS, min(PROGRAMS_PER_ROW * num_rows, MAX_PROGRAMS))
    if beside_chunks:
        num_programs = max(PROGRAMS_BESIDE_CHUNKS, num_rows)
    part = (num_items, shape.num_kv_heads, shape.group)
    sinks = jnp.zeros((shape.num_kv_heads, shape.group)) if options.sinks is None else options.sinks
    in_assembly = invariant and not interpret
    kernel = _Decode(shape, options._replace(sinks=None), launch, options.sinks is not None, invariant, in_assembly)
    float32 = [jax.ShapeDtypeStruct(size, jnp.float32) for size in (part, part, (*part, shape.head_dim))]
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    sinks = sinks.reshape(shape.num_kv_heads, shape.group)
    *parts, out = pl.pallas_call(
        kernel.attend,
        out_shape=[*float32, like_q],
        grid=(min(num_items, num_programs), shape.num_kv_heads),
        compiler_params=plt.CompilerParams(num_warps=launch.num_warps, num_stages=launch.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(work.ends, work.splits_per_item, *work.items, work.tables, q, pages_k, pages_v, sinks)
    return pl.pallas_call(
        kernel.fold,
        out_shape=like_q,
        grid=(num_rows, shape.num_kv_heads),
        input_output_aliases={7: 0},
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=2),
        interpret=interpret,
        name="paged_decode_fold",
    )(work.ends, work.token, work.splits_per_item, *parts, sinks, out)


class _Decode(NamedTuple):
    """Both kernels of one launch."""

    shape: Shape
    options: Options
    launch: Launch
    has_sinks: bool
    invariant: bool
    in_assembly: bool

    def attend(
        self, ends, splits_per_item, tokens, item_rows, starts, positions, tables, q_ref, pages_k, pages_v, sinks,
        peaks, totals, sums, out,
    ):  # fmt: skip
        program, num_programs, head = pl.program_id(0), pl.num_programs(0), pl.program_id(1)
        shape, launch = self.shape, self.launch
        rows = max(MIN_ROWS, pl.next_power_of_2(shape.group))
        group, columns = jnp.arange(rows), jnp.arange(shape.columns)
        in_group = jnp.minimum(group, shape.group - 1)
        is_column = (columns < shape.head_dim)[None, :]
        is_value = (group < shape.group)[:, None] & is_column
        num_items, size = tokens.shape[0], launch.split * splits_per_item[0]
        sink = plt.load(sinks.at[head, in_group]) if self.has_sinks else None

        def one_item(index, info):
            token, row, start, position = info
            item = program + index * num_programs
            following = jnp.minimum(item + num_programs, num_items - 1)
            q = plt.load(q_ref.at[token, head, in_group[:, None], columns[None, :]], mask=is_column, other=0)
            context = Context(tables, row, pages_k, pages_v, head)
            at = jnp.full(rows, position)
            walk = Walk(q, at, context, shape, self.options, launch.context_tile, self.in_assembly, self.invariant)
            first = jnp.maximum(start, first_seen(position, self.options, launch.context_tile))
            state = walk.in_splits(first, jnp.minimum(start + size, position + 1), launch.split)

            @pl.when(position < size)  # all of the context
            def _():
                self._store(out.at[token, head, group[:, None], columns[None, :]], state, sink, mask=is_value)

            @pl.when(position >= size)
            def _():
                plt.store(peaks.at[item, head, group], state.peak, mask=group < shape.group)
                plt.store(totals.at[item, head, group], state.total, mask=group < shape.group)
                plt.store(sums.at[item, head, group[:, None], columns[None, :]], state.values, mask=is_value)

            return tokens[following], item_rows[following], starts[following], positions[following]

        trips = pl.cdiv(jnp.maximum(ends[ends.shape[0] - 1] - program, 0), num_programs)
        begin = tokens[program], item_rows[program], starts[program], positions[program]
        jax.lax.fori_loop(0, trips, one_item, begin)

    def fold(self, ends, tokens, splits_per_item, peaks, totals, sums, sinks, _, out):
        """Folds the parts of contexts that have several; `out` holds the others already."""
        row, head, shape = pl.program_id(0), pl.program_id(1), self.shape
        first, last, token = jnp.where(row > 0, ends[jnp.maximum(row - 1, 0)], 0), ends[row], tokens[row]
        group, columns = jnp.arange(pl.next_power_of_2(shape.group)), jnp.arange(shape.columns)
        is_head = group < shape.group
        mask = is_head[:, None] & (columns < shape.head_dim)[None, :]
        sink = plt.load(sinks.at[head, jnp.minimum(group, shape.group - 1)]) if self.has_sinks else None

        def load(item) -> Running:
            item, valid = jnp.minimum(item, last - 1), item < last
            peak = plt.load(peaks.at[item, head, group], mask=is_head & valid, other=NEGATIVE)
            total = plt.load(totals.at[item, head, group], mask=is_head & valid, other=0)
            values = plt.load(sums.at[item, head, group[:, None], columns[None, :]], mask=mask & valid, other=0)
            return Running(peak, total, values)

        def add(index, state: Running) -> Running:
            # Loaded together, so that the wait is one.
            parts = [load(first + index * SPLITS_PER_SPAN + part) for part in range(SPLITS_PER_SPAN)]
            one_by_one = reduce(merge, parts, state)
            if self.invariant:
                return one_by_one
            as_span = merge(state, reduce(merge, parts))
            return jax.tree.map(partial(jnp.where, splits_per_item[0] == 1), as_span, one_by_one)

        @pl.when(last - first > 1)
        def _():
            trips = pl.cdiv(last - first, SPLITS_PER_SPAN)
            state = jax.lax.fori_loop(0, trips, add, nothing_seen(len(group), shape.columns))
            self._store(out.at[token, head, group[:, None], columns[None, :]], state, sink, mask=mask)

    def _store(self, to, state: Running, sink, *, mask):
        total = state.total if sink is None else state.total + sink_weight(sink, state.peak)
        values = state.values * (self.options.v_scale / jnp.maximum(total, 1e-30))[:, None]
        plt.store(to, values.astype(to.ref.dtype), mask=mask)
