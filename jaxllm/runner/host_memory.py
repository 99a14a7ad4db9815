"""Chunks of K/V in host memory, and the copies between them and the cache.

On a GPU the memory is pinned: 52 GB/s each way to an H200, and beside a running step. It is taken once, when the
engine starts: a chunk that is written takes the place, of the same size, that the one before it gives up.
A copy is one program on the device, which gathers all layers' K and V of a chunk's blocks or scatters them, and one
transfer. All are launched in the device's order: what is gathered is what earlier steps left, and blocks may be given
to others at once.
Invariant: a chunk is an array that nobody writes to again, and a transfer from it waits for the one that made it: a
host block is read only when its copy is complete.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.memory import CacheSize
from jaxllm.models.attention import LayerCache
from jaxllm.parallel.sharding import KV_CHUNK_AXES, named_sharding, replicated
from jaxllm.runner.executable_store import ExecutableStore
from jaxllm.runner.small_programs import get_program
from jaxllm.scheduling.plan import StepPlan, SwapIn, SwapOut

CHUNK_TOKENS = 256
"""Tokens in a chunk. More make fewer, longer transfers; what shares a chunk is moved together."""
FEWEST_STAGED, MOST_STAGED = 4, 32
"""Chunks that may be on the device at once, on their way out or in."""
STAGED_SHARE = 64
"""A device gives one part in so many of its memory for them."""
TIMED_CHUNKS = 4

type Cache = tuple[LayerCache, ...]


def chunk_blocks(block_size: int) -> int:
    """Blocks in a chunk."""
    return max(CHUNK_TOKENS // block_size, 1)


def staged_chunks(limit: int | None, chunk_bytes: int) -> int:
    """How many chunks may be on a device of so many bytes (None: nobody knows) on their way."""
    return (
        FEWEST_STAGED if limit is None else min(max(limit // STAGED_SHARE // chunk_bytes, FEWEST_STAGED), MOST_STAGED)
    )


class HostMemory:
    """The chunks of one engine.

    Args:
        cache: its shapes, as a pytree of `jax.ShapeDtypeStruct`.
        size: the number of chunks may be 0.
        staged: most chunks on the device at once on their way out, and as many on their way in.
    """

    def __init__(self, cache: Cache, size: CacheSize, staged: int, store: ExecutableStore | None = None) -> None:
        self._cache, self._num_blocks, self._rows = cache, size.num_blocks, size.chunk_blocks
        self._num_chunks, self._staged, self._store = size.host_chunks, staged, store
        pages = cache[0].keys
        sharding: Any = pages.sharding
        mesh = sharding.mesh
        shape = (len(jax.tree.leaves(cache)), size.chunk_blocks, *pages.shape[1:])
        self._chunk = jax.ShapeDtypeStruct(shape, pages.dtype, sharding=named_sharding(mesh, KV_CHUNK_AXES))
        self._host = self._chunk.sharding.with_memory_kind("pinned_host")
        self._ids = jax.ShapeDtypeStruct((size.chunk_blocks,), jnp.int32, sharding=replicated(mesh))
        self._chunks: list[jax.Array | None] = [None] * size.host_chunks
        self._leaving: deque[Any] = deque()
        self._num_entering = 0
        """Chunks whose way in was begun since the device was last waited for."""
        self.num_out = 0
        """Chunks that were copied to the host."""
        self.num_in = 0
        """Chunks that were copied back."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, on all devices together."""
        return int(np.prod(self._chunk.shape)) * self._chunk.dtype.itemsize

    def compile(self) -> None:
        """Compiles what copies need; otherwise each program is compiled when it is first needed."""
        if self._num_chunks:
            _ = self._gather, self._scatter

    def allocate(self) -> None:
        """Takes the memory."""
        if self._num_chunks:
            zeros = jnp.zeros(self._chunk.shape, self._chunk.dtype, device=self._chunk.sharding)
            self._chunks = [jax.device_put(zeros, self._host) for _ in self._chunks]
            jax.block_until_ready(self._chunks)

    def run(self, plan: StepPlan, cache: Cache) -> Cache:
        """Starts a plan's copies; the cache as its step needs it. The one given is donated if anything comes back."""
        for move in plan.swap_out:
            self._copy_out(move, cache)
        for move in plan.swap_in:
            if self._num_entering == self._staged:
                cache[0].keys.block_until_ready()
                self._num_entering = 0
            cache = self._copy_in(move, cache)
            self._num_entering += 1
        self.num_out += len(plan.swap_out)
        self.num_in += len(plan.swap_in)
        return cache

    def measure(self, cache: Cache) -> tuple[Cache, float, float]:
        """Seconds of copying a chunk out and in, with the cache, whose contents stay what they are."""
        count = min(TIMED_CHUNKS, self._num_chunks)
        out = tuple(SwapOut(chunk, (0,) * self._rows) for chunk in range(count))
        rows, nowhere = tuple(range(self._rows)), (self._num_blocks,) * self._rows
        back = tuple(SwapIn(chunk, rows, nowhere) for chunk in range(count))
        cache, out_seconds = self._time(StepPlan(swap_out=out), cache)
        cache, in_seconds = self._time(StepPlan(swap_in=back), cache)
        self.num_out = self.num_in = 0
        return cache, out_seconds / count, in_seconds / count

    def close(self) -> None:
        """Gives the memory back."""
        for chunk in self._chunks:
            if chunk is not None and not chunk.is_deleted():
                chunk.delete()
        self._chunks = []
        self._leaving.clear()

    def _time(self, plan: StepPlan, cache: Cache) -> tuple[Cache, float]:
        start = 0.0
        for _ in range(2):  # the first time is slow
            jax.block_until_ready(cache)
            start = time.perf_counter()
            cache = self.run(plan, cache)
            jax.block_until_ready((cache, self._chunks))
        return cache, time.perf_counter() - start

    def _copy_out(self, move: SwapOut, cache: Cache) -> None:
        while self._leaving and (len(self._leaving) >= self._staged or self._leaving[0].is_ready()):
            self._leaving.popleft().block_until_ready()
        gathered = self._gather(cache, self._padded(move.block_ids, 0))
        self._chunks[move.chunk] = None  # so that its memory is free, unless a transfer reads it
        chunk = jax.device_put(gathered, self._host)
        self._chunks[move.chunk] = chunk
        self._leaving.append(chunk)

    def _copy_in(self, move: SwapIn, cache: Cache) -> Cache:
        staged = jax.device_put(self._chunks[move.chunk], self._chunk.sharding)
        return self._scatter(cache, staged, self._padded(move.rows, 0), self._padded(move.block_ids, self._num_blocks))

    def _padded(self, ids: Sequence[int], value: int) -> np.ndarray:
        padded = np.full(self._rows, value, np.int32)
        padded[: len(ids)] = ids
        return padded

    @cached_property
    def _gather(self) -> jax.stages.Compiled:
        return get_program(
            self._store, f"gather_chunk-{self._rows}", gather_chunk, (self._cache, self._ids), self._chunk
        )

    @cached_property
    def _scatter(self) -> jax.stages.Compiled:
        arguments = (self._cache, self._chunk, self._ids, self._ids)
        return get_program(self._store, f"scatter_chunk-{self._rows}", scatter_chunk, arguments, self._cache)


def gather_chunk(cache: Cache, block_ids: Int[Array, " rows"]) -> Array:
    """[arrays, rows, block_size, kv_heads, head_dim]: these blocks of every layer's K and V."""
    return jnp.stack([pages[block_ids] for pages in jax.tree.leaves(cache)])


def scatter_chunk(cache: Cache, chunk: Array, rows: Int[Array, " rows"], block_ids: Int[Array, " rows"]) -> Cache:
    """The cache with rows of a chunk in these blocks; a block past the last one is dropped."""
    leaves, structure = jax.tree.flatten(cache)
    taken = [
        pages.at[block_ids].set(part[rows], mode="drop", unique_indices=True)
        for pages, part in zip(leaves, chunk, strict=True)
    ]
    return jax.tree.unflatten(structure, taken)
