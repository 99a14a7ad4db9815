"""Paged attention for NVIDIA GPUs in Pallas (Triton lowering): block tables are read inside the kernels.

Two kernels, chosen by shape. With one token per row (decode) a context is cut into splits of a fixed
number of tokens: how many splits a row has, and the order in which they are merged, depend on the row
alone. Otherwise (chunks) a program owns a tile of queries of one row and one K/V head and walks over
its context. Query heads that share a K/V head share its loads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from jaxllm.kernels.query_tiles import QueryTiles, Sizes, cut_queries

NEGATIVE = -1e30
"""The peak before any score: finite, so that exp(-inf - NEGATIVE) is 0 and not NaN."""
LOG2E = 1.4426950408889634
SPLIT = 1024
"""Tokens of context in one split."""
MIN_ROWS = 16
"""Rows a matrix product has at the least."""
CHUNK_ROWS = 256
"""Rows (queries times heads of a group) of a tile of a chunk."""


class Launch(NamedTuple):
    """How a kernel is run; found by tuning."""

    context_tile: int
    num_warps: int
    num_stages: int


DECODE = Launch(64, 4, 4)
CHUNK = Launch(64, 8, 2)
MAX_ITEM_PROGRAMS = 1024
"""Programs over work items, per K/V head; each takes every so manieth item."""


class DecodeWork(NamedTuple):
    """The splits of all rows, one after the other."""

    count: Int[Array, "1"]
    token: Int[Array, " items"]
    split: Int[Array, " items"]
    first_item: Int[Array, " tokens+1"]
    position: Int[Array, " tokens"]
    row: Int[Array, " tokens"]
    tables: Int[Array, "rows max_blocks"]


class ChunkWork(NamedTuple):
    """The query tiles of all rows."""

    tiles: QueryTiles
    num_tokens: Int[Array, " tiles"]
    tables: Int[Array, "rows max_blocks"]


def prepare(block_tables, kv_lens, cu_q_lens, sizes: Sizes) -> DecodeWork | ChunkWork:
    """See `prepare_attention`."""
    num_tokens = sizes.num_tokens
    if num_tokens > kv_lens.shape[0]:
        rows = CHUNK_ROWS if sizes.head_dim <= 128 else CHUNK_ROWS // 2  # what shared memory holds
        tiles = cut_queries(kv_lens, cu_q_lens, num_tokens, rows // sizes.group)
        return ChunkWork(tiles, tiles.valid.sum(axis=1, dtype=jnp.int32), block_tables)
    tiles = cut_queries(kv_lens, cu_q_lens, num_tokens, 1)
    position, valid = tiles.position[:, 0], tiles.valid[:, 0]
    num_splits = jnp.where(valid, position // SPLIT + 1, 0)
    ends = jnp.cumsum(num_splits)
    items = jnp.arange(num_tokens * -(-block_tables.shape[1] * sizes.block_size // SPLIT))
    token = jnp.minimum(jnp.searchsorted(ends, items, side="right", method="compare_all"), num_tokens - 1).astype(
        jnp.int32
    )
    first_item = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
    split = items - first_item[token]
    return DecodeWork(ends[-1:], token, split, first_item, position, tiles.row, block_tables)


def attend(q, k_cache, v_cache, work: DecodeWork | ChunkWork, *, interpret: bool = False, **options: Any) -> Array:
    """See `attend` of `ragged_paged_attention`."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    shape = Shape(num_kv_heads, q.shape[1] // num_kv_heads, head_dim, k_cache.shape[1])
    grouped = q.reshape(q.shape[0], num_kv_heads, shape.group, head_dim)
    pages = [cache.reshape(-1, num_kv_heads, head_dim) for cache in (k_cache, v_cache)]
    decodes = type(work) is DecodeWork
    run = _decode if decodes else _attend_chunks
    return run(grouped, *pages, work, shape, Options(**options), interpret=interpret).reshape(q.shape)


class Shape(NamedTuple):
    """The static sizes a kernel is made for."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int

    @property
    def columns(self) -> int:
        return pl.next_power_of_2(self.head_dim)


class Options(NamedTuple):
    """Keyword arguments of `attend`."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Array | None
    k_scale: float
    v_scale: float


class Running(NamedTuple):
    """The state of the online softmax of the rows of a tile; scores are in units of log 2."""

    peak: Array
    total: Array
    values: Array


def _start(rows: int, columns: int) -> Running:
    return Running(jnp.full(rows, NEGATIVE), jnp.zeros(rows), jnp.zeros((rows, columns)))


def _load(pages, slots, head, shape: Shape, valid):
    """[slots, columns] of one head; 0 where not valid, whatever lies there."""
    columns = jnp.arange(shape.columns)
    mask = valid[:, None] & (columns < shape.head_dim)
    return plt.load(pages.at[slots[:, None], head, columns[None, :]], mask=mask, other=0)


def _walk(q, refs, first, last, position, shape: Shape, options: Options, tile: int) -> Running:
    """Attention of q [rows, columns] at `position` [rows] over positions first to last - 1 of one row's context."""
    tables, row, pages_k, pages_v, head = refs
    scale = options.scale * options.k_scale

    def step(index, state: Running) -> Running:
        context = first + index * tile + jnp.arange(tile)
        valid = context < last
        block = plt.load(tables.at[row, context // shape.block_size], mask=valid, other=0)
        slots = block * shape.block_size + context % shape.block_size
        keys = _load(pages_k, slots, head, shape, valid)
        scores = plt.dot(q, keys, trans_b=True) * scale
        if options.soft_cap is not None:
            scores = jnp.tanh(scores / options.soft_cap) * options.soft_cap
        distance = position[:, None] - context[None, :]
        seen = (distance >= 0) & valid[None, :]
        if options.window is not None:
            seen &= distance < options.window
        scores = jnp.where(seen, scores * LOG2E, -jnp.inf)
        peak = jnp.maximum(state.peak, scores.max(axis=1))
        weights = jnp.exp2(scores - peak[:, None])
        shrink = jnp.exp2(state.peak - peak)
        values = _load(pages_v, slots, head, shape, valid)
        added = plt.dot(weights.astype(values.dtype), values)
        return Running(peak, state.total * shrink + weights.sum(axis=1), state.values * shrink[:, None] + added)

    return jax.lax.fori_loop(0, pl.cdiv(last - first, tile), step, _start(q.shape[0], shape.columns))


def _first_seen(position, options: Options, tile: int):
    """Where a walk may begin: a whole tile at or before the first position that `position` sees."""
    return 0 if options.window is None else jnp.maximum(position - options.window + 1, 0) // tile * tile


def _decode(q, pages_k, pages_v, work: DecodeWork, shape: Shape, options: Options, *, interpret: bool):
    num_items, rows = work.token.shape[0], max(MIN_ROWS, pl.next_power_of_2(shape.group))
    partial_shape = (num_items, shape.num_kv_heads, shape.group)
    out_shape = [
        jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        jax.ShapeDtypeStruct((*partial_shape, shape.head_dim), jnp.float32),
    ]
    parts = pl.pallas_call(
        partial(_decode_kernel, shape=shape, options=options._replace(sinks=None), rows=rows, launch=DECODE),
        out_shape=out_shape,
        grid=(min(num_items, MAX_ITEM_PROGRAMS), shape.num_kv_heads),
        compiler_params=plt.CompilerParams(num_warps=DECODE.num_warps, num_stages=DECODE.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(work.count, work.token, work.split, work.position, work.row, work.tables, q, pages_k, pages_v)
    sinks = jnp.zeros((shape.num_kv_heads, shape.group)) if options.sinks is None else options.sinks
    return pl.pallas_call(
        partial(_merge_kernel, shape=shape, options=options._replace(sinks=None), has_sinks=options.sinks is not None),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0], shape.num_kv_heads * shape.group),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name="paged_decode_merge",
    )(work.first_item, *parts, sinks.reshape(shape.num_kv_heads, shape.group))


def _decode_kernel(
    count, item_token, item_split, positions, item_row, tables, q_ref, pages_k, pages_v, peaks, totals, sums,
    *, shape: Shape, options: Options, rows: int, launch: Launch,
):  # fmt: skip
    program, num_programs, head = pl.program_id(0), pl.num_programs(0), pl.program_id(1)
    group = jnp.arange(rows)
    columns = jnp.arange(shape.columns)
    is_head = group < shape.group
    in_group = jnp.minimum(group, shape.group - 1)

    def one_item(index, _):
        item = program + index * num_programs
        token = item_token[item]
        position, start = positions[token], item_split[item] * SPLIT
        first = jnp.maximum(start, _first_seen(position, options, launch.context_tile))
        last = jnp.minimum(start + SPLIT, position + 1)
        mask = (columns < shape.head_dim)[None, :]
        q = plt.load(q_ref.at[token, head, in_group[:, None], columns[None, :]], mask=mask, other=0)
        refs = (tables, item_row[token], pages_k, pages_v, head)
        state = _walk(q, refs, first, last, jnp.full(rows, position), shape, options, launch.context_tile)
        plt.store(peaks.at[item, head, group], state.peak, mask=is_head)
        plt.store(totals.at[item, head, group], state.total, mask=is_head)
        out_mask = is_head[:, None] & mask
        plt.store(sums.at[item, head, group[:, None], columns[None, :]], state.values, mask=out_mask)

    trips = pl.cdiv(jnp.maximum(count[0] - program, 0), num_programs)
    jax.lax.fori_loop(0, trips, one_item, None)


def _merge_kernel(first_item, peaks, totals, sums, sinks, out, *, shape: Shape, options: Options, has_sinks: bool):
    token = pl.program_id(0)
    head, in_group = pl.program_id(1) // shape.group, pl.program_id(1) % shape.group
    columns = jnp.arange(shape.columns)
    mask = columns < shape.head_dim

    def add(item, state: Running) -> Running:
        other = Running(
            peaks[item, head, in_group],
            totals[item, head, in_group],
            plt.load(sums.at[item, head, in_group, columns], mask=mask, other=0),
        )
        peak = jnp.maximum(state.peak, other.peak)
        ours, theirs = jnp.exp2(state.peak - peak), jnp.exp2(other.peak - peak)
        return Running(peak, state.total * ours + other.total * theirs, state.values * ours + other.values * theirs)

    empty = Running(jnp.float32(NEGATIVE), jnp.float32(0), jnp.zeros(shape.columns))
    state = jax.lax.fori_loop(first_item[token], first_item[token + 1], add, empty)
    total = state.total
    if has_sinks:
        total += _sink_weight(sinks[head, in_group], state.peak)
    values = state.values * (options.v_scale / jnp.maximum(total, 1e-30))
    plt.store(out.at[token, head, in_group, columns], values.astype(out.dtype), mask=mask)


def _sink_weight(logit, peak):
    """A sink's weight beside a total that is relative to `peak`."""
    return jnp.exp2(jnp.minimum(logit.astype(jnp.float32) * LOG2E - peak, 100.0))


def _attend_chunks(q, pages_k, pages_v, work: ChunkWork, shape: Shape, options: Options, *, interpret: bool):
    rows = max(MIN_ROWS, pl.next_power_of_2(work.tiles.token.shape[1] * shape.group))
    sinks = jnp.zeros((shape.num_kv_heads, shape.group)) if options.sinks is None else options.sinks
    kernel = partial(
        _chunk_kernel,
        shape=shape,
        options=options._replace(sinks=None),
        has_sinks=options.sinks is not None,
        rows=rows,
        launch=CHUNK,
    )
    tiles = work.tiles
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(shape.num_kv_heads, tiles.row.shape[0]),
        compiler_params=plt.CompilerParams(num_warps=CHUNK.num_warps, num_stages=CHUNK.num_stages),
        interpret=interpret,
        name="paged_chunks",
    )(
        tiles.row, tiles.token[:, 0], tiles.position[:, 0], work.num_tokens, work.tables, q, pages_k, pages_v,
        sinks.reshape(shape.num_kv_heads, shape.group),
    )  # fmt: skip


def _chunk_kernel(
    tile_row, tile_token, tile_position, tile_size, tables, q_ref, pages_k, pages_v, sinks, out,
    *, shape: Shape, options: Options, has_sinks: bool, rows: int, launch: Launch,
):  # fmt: skip
    head, tile = pl.program_id(0), pl.program_id(1)
    size = tile_size[tile]

    @pl.when(size > 0)
    def _():
        index = jnp.arange(rows)
        offset, in_group = index // shape.group, index % shape.group
        columns = jnp.arange(shape.columns)
        mask = (offset < size)[:, None] & (columns < shape.head_dim)[None, :]
        where = (tile_token[tile] + offset)[:, None], head, in_group[:, None], columns[None, :]
        q = plt.load(q_ref.at[where], mask=mask, other=0)
        start = tile_position[tile]
        first = _first_seen(start, options, launch.context_tile)
        refs = (tables, tile_row[tile], pages_k, pages_v, head)
        state = _walk(q, refs, first, start + size, start + offset, shape, options, launch.context_tile)
        total = state.total
        if has_sinks:
            total += _sink_weight(plt.load(sinks.at[head, in_group]), state.peak)
        values = state.values * (options.v_scale / jnp.maximum(total, 1e-30))[:, None]
        plt.store(out.at[where], values.astype(out.dtype), mask=mask)
