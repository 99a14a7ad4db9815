"""Paged attention for NVIDIA GPUs in Pallas (Triton lowering): block tables are read inside the kernels.

Two kernels: of rows of one token (decode), and of rows of more (chunks). A step that may have both kinds runs both;
they write into one array, each its own tokens. Query heads that share a K/V head share its loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from jaxllm.kernels import paged_chunks, paged_decode
from jaxllm.kernels.launches import Kernel, Launch, find_launch
from jaxllm.kernels.paged_chunks import ChunkWork
from jaxllm.kernels.paged_decode import DecodeWork
from jaxllm.kernels.paged_walk import Call, Options, Shape
from jaxllm.kernels.query_tiles import Sizes


@partial(jax.tree_util.register_dataclass, data_fields=["decode", "chunks"], meta_fields=["invariant"])
@dataclass(frozen=True)
class Work:
    """What both kernels do."""

    decode: DecodeWork
    chunks: ChunkWork | None
    """None in steps where no row has more than one token."""
    invariant: bool
    """See `Sizes`."""


def prepare(block_tables, kv_lens, cu_q_lens, sizes: Sizes) -> Work:
    """See `prepare_attention`."""
    rows, (decode, chunks) = (block_tables, kv_lens, cu_q_lens), _launches(sizes.head_dim, sizes.invariant)
    work = paged_decode.prepare(*rows, sizes, decode)
    tiles = None if sizes.single_queries else paged_chunks.prepare(*rows, sizes, chunks)
    return Work(work, tiles, sizes.invariant)


def attend(q, k_cache, v_cache, work: Work, *, interpret: bool = False, **options: Any) -> Array:
    """See `attend` of `ragged_paged_attention`."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    shape = Shape(num_kv_heads, q.shape[1] // num_kv_heads, head_dim, k_cache.shape[1])
    arrays = (
        q.reshape(q.shape[0], num_kv_heads, shape.group, head_dim),
        *(cache.reshape(-1, num_kv_heads, head_dim) for cache in (k_cache, v_cache)),
    )
    decode, chunks = (
        Call(shape, Options(**options), launch, interpret, work.invariant)
        for launch in _launches(head_dim, work.invariant)
    )
    out = paged_decode.attend(*arrays, work.decode, decode, beside_chunks=work.chunks is not None)
    if work.chunks is not None:
        out = paged_chunks.attend(*arrays, work.chunks, chunks, out=out)
    return out.reshape(q.shape)


def _launches(head_dim: int, invariant: bool) -> tuple[Launch, Launch]:
    """Of decoding and of chunks."""
    kernels: tuple[Kernel, Kernel] = ("invariant_decode", "invariant_chunks") if invariant else ("decode", "chunks")
    decode, chunks = (find_launch(kernel, _device_kind(), head_dim) for kernel in kernels)
    return decode, chunks


def _device_kind() -> str:
    """Of the device that the code being traced is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind
