"""How large the K/V cache is, and its arrays.

The number of blocks is part of every compiled shape: it is a pure function of the configuration and of
measured bytes, rounded down, so that the same start gives the same shapes and finds its executables.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import CacheSize, EngineConfig, ModelConfig
from jaxllm.models.attention import LayerCache
from jaxllm.parallel.sharding import KV_CACHE_AXES, named_sharding

CPU_CACHE_BYTES = 2 << 30
"""Default ceiling on a CPU, where the cache competes with everything else for memory."""
ROUNDING = 256
MAX_ARRAY_ELEMENTS = 2**31 - 1
"""Kernels index with 32 bits."""


def cache_size(
    config: EngineConfig, model: ModelConfig, itemsize: int, available_bytes: int, longest: tuple[int, int]
) -> CacheSize:
    """Decides the number of blocks.

    Args:
        itemsize: bytes of one cached number.
        available_bytes: bytes per device for the cache, if the configuration names none.
        longest: max_model_len and max_num_seqs.

    Raises:
        ValueError: the cache would not hold one request of max_model_len.
    """
    max_model_len, max_num_seqs = longest
    block_bytes = model.kv_bytes_per_token(itemsize) * config.block_size // config.tensor_parallel_size
    needed = -(-max_model_len // config.block_size) + 1
    blocks, remedy = _affordable(config, block_bytes, available_bytes, needed)
    if config.num_gpu_blocks_override is None:
        blocks = min(blocks, max_num_seqs * (needed - 1) + 1)
    if blocks > (most := _most_blocks(config, model)):
        blocks, remedy = most, "raise tensor_parallel_size"
    size = CacheSize(blocks, config.block_size)
    if blocks < needed:
        shorter = f"lower max_model_len to at most {size.num_tokens}, or " if size.num_tokens > 1 else ""
        raise ValueError(
            f"max_model_len={max_model_len} needs {needed} K/V cache blocks of {size.block_size} tokens "
            f"({math.ceil(needed * block_bytes / 2**20)} MiB per device), but there are {blocks}: {shorter}{remedy}"
        )
    return size


def _affordable(config: EngineConfig, block_bytes: int, available_bytes: int, needed: int) -> tuple[int, str]:
    """Number of blocks the configuration names or memory holds, and what a user does to get more."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, "raise num_gpu_blocks_override"
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // block_bytes, "raise kv_cache_memory_bytes"
    blocks = _round_down(max(available_bytes, 0) // block_bytes, needed)
    return blocks, "set kv_cache_memory_bytes, or raise gpu_memory_utilization"


def _round_down(blocks: int, needed: int) -> int:
    """A measured number may be a little different at the next start; not below `needed` if it was not."""
    if blocks <= ROUNDING:
        return blocks
    return max(blocks // ROUNDING * ROUNDING, min(blocks, needed))


def _most_blocks(config: EngineConfig, model: ModelConfig) -> int:
    per_block = config.block_size * model.num_kv_heads * model.head_dim // config.tensor_parallel_size
    return MAX_ARRAY_ELEMENTS // per_block


def cache_specs(size: CacheSize, model: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> tuple[LayerCache, ...]:
    """Shapes of every layer's K and V: [blocks, block_size, kv_heads, head_dim], sharded over K/V heads."""
    shape = (size.num_blocks, size.block_size, model.num_kv_heads, model.head_dim)
    spec: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, KV_CACHE_AXES))
    return tuple(LayerCache(spec, spec) for _ in range(model.num_layers))


def allocate(specs):
    """Zeros of these shapes, made on their devices (NaN left by an earlier owner of the memory cannot leak)."""
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=spec.sharding), specs)
