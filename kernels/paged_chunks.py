"""Paged attention of chunks of prompts, rows of more than one token, for NVIDIA GPUs.

A tile of queries of one row and one K/V head is one program's. It walks over the row's context split by
split and merges the splits in order: a token's result does not depend on how its prompt was cut into chunks of
two tokens or more.
Splits may be longer than decoding's (on an H200 they have no end: folding every 1,024 tokens costs 5 %), and
a tile's weights are added up in another order than a token's: a token computed in a chunk has not the bits it
has when it is decoded. With `Call.invariant` it has: splits and tiles of the context are decoding's, and the matrix
units add up the weights.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from jaxllm.kernels.launches import Launch
from jaxllm.kernels.paged_walk import (
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

LEAST_QUERIES = 2
"""Queries of a row that make it a chunk."""
SPARE_PROGRAMS = 16
"""Programs per K/V head beyond what whole tiles need: more rows than that end in a tile that is not whole but seldom."""
SMALLEST_TILE, FEWEST_TILES = 64, 16
"""Rows of the smallest tile, and the tiles that a K/V head's queries should fill before tiles are larger."""


class ChunkWork(NamedTuple):
    """The query tiles of all rows of more than one token, those that take longest first."""

    ends: Int[Array, " rows"]
    """Tiles of each row and of all rows before it."""
    row: Int[Array, " tiles"]
    token: Int[Array, " tiles"]
    """The first of the tile."""
    position: Int[Array, " tiles"]
    """Its own."""
    num_tokens: Int[Array, " tiles"]
    tables: Int[Array, "rows max_blocks"]


def prepare(block_tables, kv_lens, cu_q_lens, sizes: Sizes, launch: Launch) -> ChunkWork:
    """Cuts the queries into tiles of `launch.rows`, heads of a group included."""
    launch = fit(launch, sizes.num_tokens, sizes.group)
    size, num_rows = launch.rows // sizes.group, kv_lens.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    most = -(-sizes.num_tokens // size) + min(num_rows, sizes.num_tokens // LEAST_QUERIES)
    row, start, num_tokens, ends = cut(jnp.where(q_lens >= LEAST_QUERIES, q_lens, 0), size, most)
    tiles = row, cu_q_lens[row] + start, (kv_lens - q_lens)[row] + start, num_tokens
    order = jnp.argsort(jnp.where(num_tokens > 0, -(tiles[2] + num_tokens), 1))
    return ChunkWork(ends, *(field[order] for field in tiles), block_tables)


def fit(launch: Launch, num_tokens: int, group: int) -> Launch:
    """With smaller tiles where a step has few tokens: else most of a GPU would wait for a few programs.

    A row of a tile still belongs to one warp, so that its sums have the same order.
    """
    rows = launch.rows
    while rows > max(SMALLEST_TILE, 2 * group - 1) and num_tokens * group < FEWEST_TILES * rows:
        rows //= 2
    return launch if rows == launch.rows else launch._replace(rows=rows, num_warps=min(launch.num_warps, rows // 16))


def num_programs(num_tokens: int, size: int, num_tiles: int) -> int:
    """Programs over tiles of so many tokens, per K/V head; each takes every so manieth tile."""
    return min(num_tiles, -(-num_tokens // size) + SPARE_PROGRAMS)


def attend(q, pages_k, pages_v, work: ChunkWork, call: Call, *, out=None):
    """Attention of the rows of more than one token.

    Args:
        q: [tokens, kv_heads, group, head_dim]; the result is like it.
        pages_k: [slots, kv_heads, head_dim].
        pages_v: likewise.
        work: of `prepare`.
        call: what is static.
        out: like q: what the result holds for other tokens, in place; by default that is of no meaning.
    """
    shape, options, launch, interpret, invariant = call
    launch = fit(launch, q.shape[0], shape.group)
    sinks = jnp.zeros((shape.num_kv_heads, shape.group)) if options.sinks is None else options.sinks
    kernel = partial(
        _chunk_kernel,
        shape=shape,
        options=options._replace(sinks=None),
        has_sinks=options.sinks is not None,
        rows=pl.next_power_of_2(launch.rows // shape.group * shape.group),
        launch=launch,
        in_assembly=not interpret,
        invariant=invariant,
    )
    arguments = (*work, q, pages_k, pages_v, sinks.reshape(shape.num_kv_heads, shape.group))
    return pl.pallas_call(
        kernel if out is None else partial(_in_place, kernel),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(shape.num_kv_heads, num_programs(q.shape[0], launch.rows // shape.group, work.row.shape[0])),
        input_output_aliases={} if out is None else {len(arguments): 0},
        compiler_params=plt.CompilerParams(num_warps=launch.num_warps, num_stages=launch.num_stages),
        interpret=interpret,
        name="paged_chunks",
    )(*arguments, *([] if out is None else [out]))


def _in_place(kernel, *refs):
    """Leaves out the input that is the output."""
    kernel(*refs[:-2], refs[-1])


def _chunk_kernel(
    ends, tile_row, tile_token, tile_position, tile_size, tables, q_ref, pages_k, pages_v, sinks, out,
    *, shape: Shape, options: Options, has_sinks: bool, rows: int, launch: Launch, in_assembly: bool,
    invariant: bool,
):  # fmt: skip
    head, program, stride = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    index = jnp.arange(rows)
    offset, in_group = index // shape.group, index % shape.group
    columns = jnp.arange(shape.columns)

    def one_tile(trip, carry):
        tile = program + trip * stride
        size, start = tile_size[tile], tile_position[tile]
        mask = (offset < size)[:, None] & (columns < shape.head_dim)[None, :]
        where = (tile_token[tile] + offset)[:, None], head, in_group[:, None], columns[None, :]
        q = plt.load(q_ref.at[where], mask=mask, other=0)
        context = Context(tables, tile_row[tile], pages_k, pages_v, head)
        walk = Walk(q, start + offset, context, shape, options, launch.context_tile, in_assembly, invariant)
        state = _over_splits(walk, start, start + size, launch)
        total = state.total
        if has_sinks:
            total += sink_weight(plt.load(sinks.at[head, in_group]), state.peak)
        values = state.values * (options.v_scale / jnp.maximum(total, 1e-30))[:, None]
        plt.store(out.at[where], values.astype(out.dtype), mask=mask)
        return carry

    jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(ends[ends.shape[0] - 1] - program, 0), stride), one_tile, 0)


def _over_splits(walk: Walk, start, end, launch: Launch) -> Running:
    """The whole context of queries at positions start to end - 1."""
    first = first_seen(start, walk.options, walk.tile)
    empty = nothing_seen(walk.q.shape[0], walk.shape.columns)

    def one_split(split) -> Running:
        begin = jnp.maximum(split * launch.split, first)
        last = jnp.minimum((split + 1) * launch.split, end)
        if walk.options.window is not None:
            return walk.over(empty, begin, last)
        # Tiles that end at or before the first query are seen by all.
        seen = jnp.maximum(jnp.minimum(last, start + 1) - begin, 0) // walk.tile
        part = walk.over_seen(empty, begin, seen)
        return walk.over(part, begin + seen * walk.tile, last)

    longest = walk.context.tables.shape[1] * walk.shape.block_size
    if longest <= launch.split:  # a second state would not fit into the registers
        return one_split(0)
    splits = first // launch.split, pl.cdiv(end, launch.split)
    return jax.lax.fori_loop(*splits, lambda split, state: merge(state, one_split(split)), empty)
