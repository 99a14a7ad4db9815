"""Queries of a step cut into tiles that never cross a row: what attention kernels work on.

Every row's tokens are covered exactly once; tiles past the last one are empty.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Sizes(NamedTuple):
    """Static sizes of a step's attention."""

    num_tokens: int
    """Tokens of the step, padding included."""
    block_size: int
    """Tokens of a block."""
    group: int
    """Query heads per K/V head."""
    head_dim: int


class QueryTiles(NamedTuple):
    """Where each tile of queries comes from; what is not valid holds 0."""

    row: Int[Array, " tiles"]
    token: Int[Array, "tiles query_tile"]
    position: Int[Array, "tiles query_tile"]
    valid: Bool[Array, "tiles query_tile"]


def cut_queries(
    kv_lens: Int[Array, " rows"], cu_q_lens: Int[Array, " rows+1"], num_tokens: int, size: int
) -> QueryTiles:
    """Cuts each row's queries into tiles of `size` tokens; with a size of 1 tile t is token t."""
    num_rows = kv_lens.shape[0]
    num_tiles = num_tokens if size == 1 else -(-num_tokens // size) + num_rows
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    tile_ends = jnp.cumsum(-(-q_lens // size))
    tile = jnp.arange(num_tiles)
    row = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right", method="compare_all"), num_rows - 1)
    first = tile_ends[row] - (-(-q_lens[row] // size))
    offset = (tile - first)[:, None] * size + jnp.arange(size)
    valid = (offset < q_lens[row][:, None]) & (tile < tile_ends[-1])[:, None]
    position = (kv_lens - q_lens)[row][:, None] + offset
    token = jnp.where(valid, cu_q_lens[row][:, None] + offset, 0)
    return QueryTiles(row, token, jnp.where(valid, position, 0), valid)
