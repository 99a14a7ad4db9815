"""Queries and contexts of a step cut into parts that never cross a row: what attention kernels work on.

Every row is covered exactly once; parts past the last one are empty.
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
    single_queries: bool = False
    """No row has more than one query."""
    invariant: bool = False
    """A token's result has the same bits decoded as in a chunk."""


class Parts(NamedTuple):
    """Where each part of what was cut comes from; parts past the last one have no length."""

    row: Int[Array, " parts"]
    start: Int[Array, " parts"]
    length: Int[Array, " parts"]
    ends: Int[Array, " rows"]
    """Parts of each row and of all rows before it."""


def cut(lengths: Int[Array, " rows"], size: int | Int[Array, ""], num_parts: int) -> Parts:
    """Cuts each row's length into parts of `size`, one row after the other."""
    counts = -(-lengths // size)
    ends, part = jnp.cumsum(counts), jnp.arange(num_parts)
    row = jnp.searchsorted(ends, part, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, lengths.shape[0] - 1)
    start = (part - (ends - counts)[row]) * size
    return Parts(row, start, jnp.where(part < ends[-1], jnp.minimum(lengths[row] - start, size), 0), ends)


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
    num_tiles = num_tokens if size == 1 else -(-num_tokens // size) + kv_lens.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    row, start, length, _ = cut(q_lens, size, num_tiles)
    offset = jnp.arange(size)
    valid = offset < length[:, None]
    position, token = (first[row, None] + start[:, None] + offset for first in (kv_lens - q_lens, cu_q_lens))
    return QueryTiles(row, jnp.where(valid, token, 0), jnp.where(valid, position, 0), valid)
