"""Paged attention for NVIDIA GPUs in Pallas (Triton lowering): block tables are read inside the kernels.

Two kernels, chosen by shape: one token per row at the most (decode), and everything else (chunks). Query
heads that share a K/V head share its loads.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from jaxllm.kernels import paged_chunks, paged_decode
from jaxllm.kernels.launches import find_launch
from jaxllm.kernels.paged_chunks import ChunkWork
from jaxllm.kernels.paged_decode import DecodeWork
from jaxllm.kernels.paged_walk import Options, Shape
from jaxllm.kernels.query_tiles import Sizes


def prepare(block_tables, kv_lens, cu_q_lens, sizes: Sizes) -> DecodeWork | ChunkWork:
    """See `prepare_attention`."""
    decodes = sizes.num_tokens <= kv_lens.shape[0]
    launch = find_launch("decode" if decodes else "chunks", _device_kind(), sizes.head_dim)
    cut = paged_decode.prepare if decodes else paged_chunks.prepare
    return cut(block_tables, kv_lens, cu_q_lens, sizes, launch)


def attend(q, k_cache, v_cache, work: DecodeWork | ChunkWork, *, interpret: bool = False, **options: Any) -> Array:
    """See `attend` of `ragged_paged_attention`."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    shape = Shape(num_kv_heads, q.shape[1] // num_kv_heads, head_dim, k_cache.shape[1])
    grouped = q.reshape(q.shape[0], num_kv_heads, shape.group, head_dim)
    pages = [cache.reshape(-1, num_kv_heads, head_dim) for cache in (k_cache, v_cache)]
    decodes = type(work) is DecodeWork
    launch = find_launch("decode" if decodes else "chunks", _device_kind(), head_dim)
    run = paged_decode.attend if decodes else paged_chunks.attend
    return run(grouped, *pages, work, shape, Options(**options), launch, interpret).reshape(q.shape)


def _device_kind() -> str:
    """Of the device that the code being traced is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind
