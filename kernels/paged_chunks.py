"""Paged attention of chunks of prompts, beside rows of one token, for NVIDIA GPUs.

A program owns a tile of queries of one row and one K/V head. It walks over the row's context split by
split and merges the splits in order: a token's result does not depend on how its prompt was cut into chunks.
Splits may be longer than decoding's (on an H200 they have no end: folding every 1,024 tokens costs 5 %), and
the matrix units add up in another order for a tile than for a token: a token computed in a chunk has not the
bits it has when it is decoded.
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
from jaxllm.kernels.query_tiles import QueryTiles, Sizes, cut_queries


class ChunkWork(NamedTuple):
    """The query tiles of all rows."""

    tiles: QueryTiles
    num_tokens: Int[Array, " tiles"]
    tables: Int[Array, "rows max_blocks"]


def prepare(block_tables, kv_lens, cu_q_lens, sizes: Sizes, launch: Launch) -> ChunkWork:
    """Cuts the queries into tiles of `launch.rows`, heads of a group included."""
    tiles = cut_queries(kv_lens, cu_q_lens, sizes.num_tokens, launch.rows // sizes.group)
    return ChunkWork(tiles, tiles.valid.sum(axis=1, dtype=jnp.int32), block_tables)


def attend(q, pages_k, pages_v, work: ChunkWork, shape: Shape, options: Options, launch: Launch, interpret: bool):
    """Attention of q [tokens, kv_heads, group, head_dim] over pages [slots, kv_heads, head_dim]."""
    sinks = jnp.zeros((shape.num_kv_heads, shape.group)) if options.sinks is None else options.sinks
    kernel = partial(
        _chunk_kernel,
        shape=shape,
        options=options._replace(sinks=None),
        has_sinks=options.sinks is not None,
        rows=pl.next_power_of_2(work.tiles.token.shape[1] * shape.group),
        launch=launch,
    )
    tiles = work.tiles
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(shape.num_kv_heads, tiles.row.shape[0]),
        compiler_params=plt.CompilerParams(num_warps=launch.num_warps, num_stages=launch.num_stages),
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
    # The last tiles of a row have the longest context: they begin first.
    head, tile = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
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
        context = Context(tables, tile_row[tile], pages_k, pages_v, head)
        walk = Walk(q, start + offset, context, shape, options, launch.context_tile)
        state = _over_splits(walk, start, start + size, launch)
        total = state.total
        if has_sinks:
            total += sink_weight(plt.load(sinks.at[head, in_group]), state.peak)
        values = state.values * (options.v_scale / jnp.maximum(total, 1e-30))[:, None]
        plt.store(out.at[where], values.astype(out.dtype), mask=mask)


def _over_splits(walk: Walk, start, end, launch: Launch) -> Running:
    """The whole context of queries at positions start to end - 1."""
    first = first_seen(start, walk.options, walk.tile)
    empty = nothing_seen(walk.q.shape[0], walk.shape.columns)

    def one_split(split, state: Running) -> Running:
        begin = jnp.maximum(split * launch.split, first)
        last = jnp.minimum((split + 1) * launch.split, end)
        if walk.options.window is None:  # tiles that end at or before the first query are seen by all
            seen = jnp.maximum(jnp.minimum(last, start + 1) - begin, 0) // walk.tile
            part = walk.over_seen(empty, begin, seen)
            part = walk.over(part, begin + seen * walk.tile, last)
        else:
            part = walk.over(empty, begin, last)
        return merge(state, part)

    return jax.lax.fori_loop(first // launch.split, pl.cdiv(end, launch.split), one_split, empty)
