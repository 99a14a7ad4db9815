"""How large the K/V cache is, and its arrays.

The number of blocks is part of every compiled shape: it is a pure function of the configuration and of
measured bytes, rounded down, so that the same start gives the same shapes and finds its executables.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.memory import GIB, CacheSize, MemoryBudget, round_blocks, show_bytes
from jaxllm.model_config import ModelConfig
from jaxllm.models.attention import LayerCache
from jaxllm.parallel.sharding import KV_CACHE_AXES, named_sharding
from jaxllm.runner.host_memory import chunk_blocks

CPU_CACHE_BYTES = 2 << 30
"""Default ceiling on a CPU, where the cache competes with everything else for memory."""
MAX_ARRAY_ELEMENTS = 2**31 - 1
"""Kernels index with 32 bits."""
MEASURED_REMEDY = (
    "raise gpu_memory_utilization or tensor_parallel_size, lower max_num_batched_tokens, or set kv_cache_memory_bytes"
)


def machine_bytes() -> int:
    """Of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class CachePlan:
    """What decides the number of blocks."""

    config: EngineConfig
    """The user's choices, with every default resolved but max_model_len="auto"."""
    model: ModelConfig
    itemsize: int
    """Bytes of one cached number."""
    budget: MemoryBudget | None
    """Of one device; None where nobody says how much memory there is (a CPU). Read only if the configuration names
    neither blocks nor bytes."""

    def size(self) -> CacheSize:
        """The cache: as much as there is room for, but no more than max_num_seqs requests of max_model_len fill.

        Raises:
            ValueError: it would not hold one request of max_model_len.
        """
        max_model_len, max_num_seqs = self.config.max_model_len, self.config.max_num_seqs
        assert isinstance(max_model_len, int) and max_num_seqs, "unresolved defaults"
        needed = -(-max_model_len // self.block_size) + 1
        room = self._room(needed)
        blocks = room.blocks
        if self.config.num_gpu_blocks_override is None:
            blocks = min(blocks, max_num_seqs * (needed - 1) + 1)
        size = CacheSize(blocks, self.block_size, self.host_chunks, chunk_blocks(self.block_size))
        if blocks < needed:
            shorter = f"lower max_model_len to at most {size.num_tokens}, or " if size.num_tokens > 1 else ""
            subject = f"max_model_len={max_model_len} needs"
            raise ValueError(f"{subject} {self._shortage(needed, room)}: {shorter}{room.remedy}")
        return size

    def longest_context(self) -> int:
        """What max_model_len="auto" stands for: the longest request there is room for, at most the model's context.

        Raises:
            ValueError: not even two tokens fit.
        """
        room = self._room(needed=2)
        tokens = CacheSize(room.blocks, self.block_size).num_tokens
        if tokens < 2:
            raise ValueError(
                "max_model_len='auto' finds no length that fits: the shortest needs "
                f"{self._shortage(2, room)}: {room.remedy}"
            )
        return min(tokens, self.model.max_position_embeddings)

    @property
    def block_size(self) -> int:
        assert isinstance(self.config.block_size, int), "unresolved defaults"
        return self.config.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on one device, over all layers."""
        return self.model.kv_bytes_per_token(self.itemsize) * self.block_size // self.config.tensor_parallel_size

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk of host memory on one device."""
        return self.block_bytes * chunk_blocks(self.block_size)

    @property
    def host_chunks(self) -> int:
        """Chunks of host memory that swap_space holds.

        Raises:
            ValueError: none, although preemption_mode needs one; or more than the machine has.
        """
        space, mode = self.config.swap_space or 0, self.config.preemption_mode
        needed, there = space * GIB * self.config.tensor_parallel_size, machine_bytes()
        if needed > there:
            raise ValueError(
                f"swap_space={space} asks for {space} GiB of host memory for each of "
                f"{self.config.tensor_parallel_size} devices, and the machine has {show_bytes(there)}: lower it"
            )
        chunks = int(space * GIB) // self.chunk_bytes
        if mode == "swap" and not chunks:
            raise ValueError(
                f"preemption_mode='swap' needs host memory, and swap_space={space} GiB holds no {show_bytes(self.chunk_bytes)} "
                "of K/V, which is the least that is copied: raise swap_space, or use preemption_mode='auto'"
            )
        return chunks

    def _room(self, needed: int) -> _Room:
        room = self._affordable(needed)
        heads = self.model.num_kv_heads // self.config.tensor_parallel_size
        most = MAX_ARRAY_ELEMENTS // (self.block_size * heads * self.model.head_dim)
        if room.blocks <= most:
            return room
        return _Room(most, most * self.block_bytes, "an array holds 2**31 numbers", "raise tensor_parallel_size")

    def _affordable(self, needed: int) -> _Room:
        config, budget = self.config, self.budget
        if (blocks := config.num_gpu_blocks_override) is not None:
            return _Room(blocks, blocks * self.block_bytes, "", "raise num_gpu_blocks_override")
        if (named := config.kv_cache_memory_bytes) is not None:
            return _Room(named // self.block_bytes, named, "", "raise kv_cache_memory_bytes")
        if budget is None:
            blocks = round_blocks(CPU_CACHE_BYTES // self.block_bytes, needed)
            why = f"a CPU gives {show_bytes(CPU_CACHE_BYTES)} by default"
            return _Room(blocks, CPU_CACHE_BYTES, why, "set kv_cache_memory_bytes")
        blocks = round_blocks(max(budget.for_cache, 0) // self.block_bytes, needed)
        return _Room(blocks, budget.for_cache, _account(budget), MEASURED_REMEDY)

    def _shortage(self, needed: int, room: _Room) -> str:
        mebibytes = math.ceil(needed * self.block_bytes / 2**20)
        missing = show_bytes(needed * self.block_bytes - room.bytes)
        return (
            f"{needed} K/V cache blocks of {self.block_size} tokens ({mebibytes} MiB per device), but there are "
            f"{room.blocks}, {missing} are missing{room.why and f' ({room.why})'}"
        )


class _Room(NamedTuple):
    """How many blocks there can be, and the words for it where they are too few."""

    blocks: int
    bytes: int
    """Per device; below 0 where the weights alone are too large."""
    why: str
    remedy: str


def _account(budget: MemoryBudget) -> str:
    temporaries = budget.reserved_temp + budget.staged
    taken = {"weights": budget.weights, "temporaries": temporaries, "state of requests": budget.state}
    listed = ", ".join(f"{show_bytes(size)} of {name}" for name, size in taken.items())
    return f"the engine may take {show_bytes(budget.limit)}, and has {listed}"


def cache_specs(size: CacheSize, model: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> tuple[LayerCache, ...]:
    """Shapes of every layer's K and V: [blocks, block_size, kv_heads, head_dim], sharded over K/V heads."""
    shape = (size.num_blocks, size.block_size, model.num_kv_heads, model.head_dim)
    spec: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, KV_CACHE_AXES))
    return tuple(LayerCache(spec, spec) for _ in range(model.num_layers))


def allocate(specs):
    """Zeros of these shapes, made on their devices (NaN left by an earlier owner of the memory cannot leak)."""
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=spec.sharding), specs)
