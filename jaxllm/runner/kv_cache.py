"""How large the K/V cache is, and its arrays.

The number of blocks is part of every compiled shape: it is a pure function of the configuration and of
measured bytes, rounded down, so that the same start gives the same shapes and finds its executables.
"""

from __future__ import annotations

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
    per_device = model.kv_bytes_per_token(itemsize) * config.block_size // config.tensor_parallel_size
    wanted = max_num_seqs * -(-max_model_len // config.block_size) + 1
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
    else:
        blocks = min((config.kv_cache_memory_bytes or available_bytes) // per_device, wanted)
        blocks = blocks // ROUNDING * ROUNDING if blocks > ROUNDING else blocks
    blocks = min(blocks, _most_blocks(config, model))
    size = CacheSize(blocks, config.block_size)
    _check_one_request_fits(size, max_model_len, per_device)
    return size


def _most_blocks(config: EngineConfig, model: ModelConfig) -> int:
    per_block = config.block_size * model.num_kv_heads * model.head_dim // config.tensor_parallel_size
    return MAX_ARRAY_ELEMENTS // per_block


def _check_one_request_fits(size: CacheSize, max_model_len: int, block_bytes: int) -> None:
    needed = -(-max_model_len // size.block_size) + 1
    if size.num_blocks >= needed:
        return
    raise ValueError(
        f"max_model_len={max_model_len} needs {needed} K/V cache blocks of {size.block_size} tokens "
        f"({needed * block_bytes / 2**20:.0f} MiB per device), but there are {size.num_blocks}: lower max_model_len "
        f"to at most {max(size.num_tokens, 0)}, or raise kv_cache_memory_bytes, gpu_memory_utilization or "
        "num_gpu_blocks_override"
    )


def cache_specs(size: CacheSize, model: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> tuple[LayerCache, ...]:
    """Shapes of every layer's K and V: [blocks, block_size, kv_heads, head_dim], sharded over K/V heads."""
    shape = (size.num_blocks, size.block_size, model.num_kv_heads, model.head_dim)
    spec: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, KV_CACHE_AXES))
    return tuple(LayerCache(spec, spec) for _ in range(model.num_layers))


def allocate(specs):
    """Zeros of these shapes, made on their devices (NaN left by an earlier owner of the memory cannot leak)."""
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=spec.sharding), specs)
