"""Attention of ragged queries over a paged K/V cache: the one attention operation of a step.

Every row of a step, a first chunk of a prompt, a later chunk, or the single token of a running
request, is a run of queries at the end of a context whose K/V lie in blocks. The result of a row
depends on nothing but its own queries and the blocks its table names: padding rows, padding tokens,
table entries beyond a context and whatever lies in unused slots (NaN included) change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from jaxllm.kernels import ragged_paged_attention_pallas as pallas
from jaxllm.kernels import ragged_paged_attention_xla as xla
from jaxllm.kernels.backend import Backend
from jaxllm.kernels.query_tiles import Sizes

__all__ = ["IMPLEMENTATIONS", "Sizes", "Work", "attend", "prepare_attention", "ragged_paged_attention"]

type Work = Any
"""What a backend derives from the rows' lengths and tables: a pytree of arrays, the same for every layer."""


class Implementation(NamedTuple):
    """The two halves of a backend."""

    prepare: Callable[..., Work]
    attend: Callable[..., Array]


IMPLEMENTATIONS: dict[Backend, Implementation] = {
    "xla": Implementation(xla.prepare, xla.attend),
    "pallas": Implementation(pallas.prepare, pallas.attend),
    "pallas_interpret": Implementation(pallas.prepare, partial(pallas.attend, interpret=True)),
}


def prepare_attention(
    block_tables: Int[Array, "rows max_blocks"],
    kv_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " rows+1"],
    *,
    sizes: Sizes,
    backend: Backend = "xla",
) -> Work:
    """The part of `ragged_paged_attention` that is the same for every layer of a step.

    Args:
        block_tables: with `kv_lens` and `cu_q_lens` as there.
        sizes: what is static.
        backend: the implementation that will attend.
    """
    return IMPLEMENTATIONS[backend].prepare(block_tables, kv_lens, cu_q_lens, sizes)


def attend(
    q: Float[Array, "tokens heads head_dim"],
    k_cache: Float[Array, "blocks block_size kv_heads head_dim"],
    v_cache: Float[Array, "blocks block_size kv_heads head_dim"],
    work: Work,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: Backend = "xla",
) -> Float[Array, "tokens heads head_dim"]:
    """`ragged_paged_attention` with what `prepare_attention` returned; arguments as there."""
    assert q.shape[1] % k_cache.shape[2] == 0, f"{q.shape[1]} query heads over {k_cache.shape[2]} K/V heads"
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    return IMPLEMENTATIONS[backend].attend(q, k_cache, v_cache, work, **options, k_scale=k_scale, v_scale=v_scale)


def ragged_paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_cache: Float[Array, "blocks block_size kv_heads head_dim"],
    v_cache: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int[Array, "rows max_blocks"],
    kv_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " rows+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    single_queries: bool = False,
    invariant: bool = False,
    backend: Backend = "xla",
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of each row's queries over its context; the K/V of the queries are already written.

    Args:
        q: queries of all rows, one row after the other; tokens past `cu_q_lens[-1]` are padding.
        k_cache: keys; position p of row r lies at `[block_tables[r, p // block_size], p % block_size]`.
        v_cache: values, likewise.
        block_tables: int32 block ids; entries past a row's context may be any valid id.
        kv_lens: context length of each row, its queries included; 0 for padding rows.
        cu_q_lens: row r's queries are `q[cu_q_lens[r]:cu_q_lens[r + 1]]`, at positions
            `kv_lens[r] - n` to `kv_lens[r] - 1`.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        window: a query sees itself and the `window - 1` positions before it; None is all of them.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` (Gemma 2, arXiv:2408.00118).
        sinks: one logit per head that takes part in the softmax and has no value (gpt-oss).
        k_scale: factor that turns stored keys into keys (for quantised caches).
        v_scale: factor that turns stored values into values.
        single_queries: no row has more than one query.
        invariant: a token has the same bits as a row's only query and as one of many; not with "xla".
        backend: the implementation; "xla" runs on any device, "pallas" on NVIDIA GPUs ("pallas_interpret" is the same
            kernels on a CPU, for tests).

    Returns:
        Weighted values in q's dtype; rows of padding tokens are of no meaning and may be NaN.
        Scores, softmax and sums are float32. The online softmax is FlashAttention's (arXiv:2205.14135).
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    sizes = Sizes(q.shape[0], block_size, q.shape[1] // num_kv_heads, head_dim, single_queries, invariant)
    work = prepare_attention(block_tables, kv_lens, cu_q_lens, sizes=sizes, backend=backend)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    return attend(q, k_cache, v_cache, work, **options, k_scale=k_scale, v_scale=v_scale, backend=backend)
