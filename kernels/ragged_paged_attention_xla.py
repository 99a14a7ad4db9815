"""Paged attention in plain XLA operations: a loop over tiles of the context with an online softmax.

The trip count is the longest context in the batch, read on the device, so that time and memory follow
what is there and not the longest context allowed. Queries are cut into tiles that never cross a row;
with one token per row a tile is one token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.kernels.query_tiles import QueryTiles, Sizes, cut_queries

NEGATIVE = -1e30
"""The peak before any score: finite, so that a tile in which everything is masked adds exp(-inf), 0."""
QUERY_TILE = 16
CONTEXT_TILE = 64


class Work(NamedTuple):
    """What every layer of a step shares."""

    tiles: QueryTiles
    tables: Int[Array, "tiles padded_blocks"]
    """The block table of each tile's row, padded with the null block to whole context tiles."""


class Accumulator(NamedTuple):
    """The state of the online softmax."""

    peak: Float[Array, "tiles kv_heads group query_tile"]
    """The largest score so far."""
    sums: Float[Array, "tiles kv_heads group query_tile head_dim+1"]
    """Weighted values and, in the last place, the sum of the weights (a value that is always 1)."""


def prepare(
    block_tables: Int[Array, "rows max_blocks"],
    kv_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " rows+1"],
    sizes: Sizes,
) -> Work:
    """See `prepare_attention`."""
    tiles = cut_queries(kv_lens, cu_q_lens, sizes.num_tokens, 1 if sizes.num_tokens <= kv_lens.shape[0] else QUERY_TILE)
    padding = -block_tables.shape[1] % _blocks_per_tile(sizes.block_size)
    return Work(tiles, jnp.pad(block_tables, ((0, 0), (0, padding)))[tiles.row])


def attend(q, k_cache, v_cache, work: Work, *, scale, window, soft_cap, sinks, k_scale, v_scale):
    """See `attend` of `ragged_paged_attention`."""
    _, block_size, num_kv_heads, _ = k_cache.shape
    tiles, blocks_per_tile = work.tiles, _blocks_per_tile(block_size)
    context_tile = blocks_per_tile * block_size
    queries = gather_queries(q, tiles, num_kv_heads) * (scale * k_scale)

    def add_context_tile(index: Array, acc: Accumulator) -> Accumulator:
        blocks = jax.lax.dynamic_slice_in_dim(work.tables, index * blocks_per_tile, blocks_per_tile, axis=1)
        keys, values = (gather_blocks(cache, blocks) for cache in (k_cache, v_cache))
        scores = jnp.einsum("nhgqd,nkhd->nhgqk", queries, keys)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = visible(index * context_tile + jnp.arange(context_tile), tiles, window)
        # Slots no query of the tile may see can hold anything: 0 * NaN would reach the sum.
        values = jnp.where(seen.any(axis=1)[:, :, None, None], values, 0)
        return accumulate(acc, jnp.where(seen[:, None, None], scores, -jnp.inf), values)

    first, last = context_tiles(tiles, context_tile, window)
    acc = jax.lax.fori_loop(first, last, add_context_tile, empty_accumulator(queries))
    return scatter_queries(finish(acc, sinks) * v_scale, tiles, q)


def _blocks_per_tile(block_size: int) -> int:
    return max(CONTEXT_TILE // block_size, 1)


def gather_blocks(cache: Float[Array, "blocks block_size kv_heads head_dim"], blocks: Int[Array, "tiles n"]) -> Array:
    """Float32 [tiles, n * block_size, kv_heads, head_dim] of the named blocks."""
    tile = cache.at[blocks].get(mode="promise_in_bounds")
    return tile.reshape(blocks.shape[0], -1, *cache.shape[2:]).astype(jnp.float32)


def visible(context: Int[Array, " k"], tiles: QueryTiles, window: int | None) -> Bool[Array, "tiles query_tile k"]:
    """Which context positions each query sees: those up to itself, within the window."""
    distance = tiles.position[:, :, None] - context
    seen = (distance >= 0) & tiles.valid[:, :, None]
    return seen if window is None else seen & (distance < window)


def context_tiles(tiles: QueryTiles, context_tile: int, window: int | None) -> tuple[Array | int, Array]:
    """First and one past the last tile of the context that any query sees."""
    last = jnp.max(tiles.position) // context_tile + 1
    if window is None:
        return 0, last
    earliest = jnp.min(jnp.where(tiles.valid, tiles.position, last * context_tile))
    return jnp.maximum(earliest - window + 1, 0) // context_tile, last


def empty_accumulator(queries: Float[Array, "tiles kv_heads group query_tile head_dim"]) -> Accumulator:
    *shape, head_dim = queries.shape
    return Accumulator(jnp.full(shape, NEGATIVE), jnp.zeros((*shape, head_dim + 1)))


def accumulate(acc: Accumulator, scores: Array, values: Array) -> Accumulator:
    """One step of the online softmax; `values` is [tiles, k, kv_heads, head_dim]."""
    peak = jnp.maximum(acc.peak, scores.max(axis=-1))
    weights = jnp.exp(scores - peak[..., None])
    values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=1)
    added = jnp.einsum("nhgqk,nkhd->nhgqd", weights, values)
    return Accumulator(peak, acc.sums * jnp.exp(acc.peak - peak)[..., None] + added)


def finish(acc: Accumulator, sinks: Float[Array, " heads"] | None) -> Array:
    """Divides by the sum of weights; a sink adds its weight to the sum and nothing to the values."""
    values, total = acc.sums[..., :-1], acc.sums[..., -1:]
    if sinks is not None:
        logits = sinks.astype(jnp.float32).reshape(1, *acc.peak.shape[1:3], 1)
        # Weights are relative to the peak; where the sink is far above it the values vanish, as they should.
        total = total + jnp.exp(jnp.minimum(logits - acc.peak, 80.0))[..., None]
    return values / jnp.maximum(total, 1e-30)


def gather_queries(q: Float[Array, "tokens heads head_dim"], tiles: QueryTiles, num_kv_heads: int) -> Array:
    """Float32 [tiles, kv_heads, group, query_tile, head_dim]."""
    num_tiles, size = tiles.token.shape
    tiled = q if size == 1 else q[tiles.token.reshape(-1)]
    grouped = tiled.astype(jnp.float32).reshape(num_tiles, size, num_kv_heads, -1, q.shape[-1])
    return grouped.transpose(0, 2, 3, 1, 4)


def scatter_queries(out: Array, tiles: QueryTiles, q: Float[Array, "tokens heads head_dim"]) -> Array:
    """Puts tiled results back to their tokens, in q's dtype."""
    num_tokens = q.shape[0]
    flat = out.transpose(0, 3, 1, 2, 4).reshape(-1, *q.shape[1:]).astype(q.dtype)
    if tiles.token.shape[1] == 1:
        return flat
    token = jnp.where(tiles.valid, tiles.token, num_tokens).reshape(-1)
    return jnp.zeros_like(q).at[token].set(flat, mode="drop")
