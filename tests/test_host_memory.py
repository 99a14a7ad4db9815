"""Copies of K/V blocks to host memory and back, on one device and spread over two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxllm.memory import CacheSize
from jaxllm.models.attention import LayerCache
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.parallel.sharding import KV_CACHE_AXES, named_sharding
from jaxllm.runner.compile_counter import num_compilations
from jaxllm.runner.host_memory import FEWEST_STAGED, MOST_STAGED, HostMemory, chunk_blocks, staged_chunks
from jaxllm.scheduling.plan import StepPlan, SwapIn, SwapOut

SHAPE = (20, 4, 2, 8)
NUM_LAYERS, ROWS, CHUNKS = 2, 3, 5


@pytest.fixture(params=[1, 2], ids=["one device", "two devices"])
def mesh(request):
    return Mesh(np.array(jax.devices()[: request.param]), (TENSOR_AXIS,))


def make_numbers() -> list[np.ndarray]:
    """Keys and values of all layers, every number of which is another."""
    size = int(np.prod(SHAPE))
    return [np.arange(size, dtype=np.float32).reshape(SHAPE) + size * part for part in range(2 * NUM_LAYERS)]


def make_memory(mesh: Mesh, staged: int = 2):
    """With its cache."""
    spec = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=named_sharding(mesh, KV_CACHE_AXES))
    specs = tuple(LayerCache(spec, spec) for _ in range(NUM_LAYERS))
    memory = HostMemory(specs, CacheSize(SHAPE[0], SHAPE[1], CHUNKS, ROWS), staged)
    memory.compile()
    memory.allocate()
    placed = [jax.device_put(numbers, spec.sharding) for numbers in make_numbers()]
    return memory, tuple(LayerCache(*placed[2 * layer : 2 * layer + 2]) for layer in range(NUM_LAYERS))


def numbers_of(cache) -> list[np.ndarray]:
    return [np.array(pages) for pages in jax.tree.leaves(cache)]


def test_blocks_come_back_as_they_left_and_no_other_is_touched(mesh):
    memory, cache = make_memory(mesh)
    out = SwapOut(3, (7, 2, 19)), SwapOut(0, (1,))
    before = num_compilations()
    cache = memory.run(StepPlan(swap_out=out), cache)
    cache = jax.tree.map(lambda pages: jax.device_put(np.zeros(SHAPE, np.float32), pages.sharding), cache)
    given = cache
    cache = memory.run(StepPlan(swap_in=(SwapIn(3, (0, 2, 0), (4, 5, 6)), SwapIn(0, (0,), (19,)))), cache)
    assert num_compilations() == before, "nothing compiles once the engine is ready"
    assert all(pages.is_deleted() for pages in jax.tree.leaves(given)), "the cache was copied, not updated"
    for found, numbers in zip(numbers_of(cache), make_numbers(), strict=True):
        expected = np.zeros(SHAPE, np.float32)
        expected[[4, 5, 6, 19]] = numbers[[7, 19, 7, 1]]
        assert np.array_equal(found, expected)
    assert (memory.num_out, memory.num_in) == (2, 2)


def test_what_leaves_goes_before_what_comes(mesh):
    """A plan gives a block that leaves to another one, and reads a chunk that it wrote."""
    memory, cache = make_memory(mesh)
    memory.run(StepPlan(swap_out=(SwapOut(0, (1, 2)),)), cache)
    plan = StepPlan(swap_out=(SwapOut(1, (5, 6)),), swap_in=(SwapIn(0, (1,), (5,)), SwapIn(1, (0,), (9,))))
    for found, numbers in zip(numbers_of(memory.run(plan, cache)), make_numbers(), strict=True):
        assert np.array_equal(found[[5, 9, 6]], numbers[[2, 5, 6]])


def test_a_chunk_that_is_read_can_be_overwritten_at_once(mesh):
    memory, cache = make_memory(mesh)
    for step in range(8):
        plan = StepPlan(swap_out=(SwapOut(0, (step, step + 1, step + 2)),), swap_in=(SwapIn(0, (1,), (step + 10,)),))
        cache = memory.run(plan, cache)
    for found, numbers in zip(numbers_of(cache), make_numbers(), strict=True):
        assert np.array_equal(found[10:18], numbers[1:9])


def test_more_chunks_than_may_be_staged_wait_for_one_another(mesh):
    memory, cache = make_memory(mesh, staged=1)
    cache = memory.run(StepPlan(swap_out=tuple(SwapOut(chunk, (chunk,)) for chunk in range(CHUNKS))), cache)
    cache = memory.run(StepPlan(swap_in=tuple(SwapIn(chunk, (0,), (10 + chunk,)) for chunk in range(CHUNKS))), cache)
    for found, numbers in zip(numbers_of(cache), make_numbers(), strict=True):
        assert np.array_equal(found[10:15], numbers[:5])


def test_host_memory_is_pinned_and_split_as_the_cache_is(mesh):
    memory, cache = make_memory(mesh)
    chunk = memory._chunks[0]
    assert chunk is not None and chunk.sharding.memory_kind == "pinned_host"
    assert chunk.shape == (2 * NUM_LAYERS, ROWS, *SHAPE[1:]) and memory.chunk_bytes == chunk.nbytes
    assert chunk.addressable_shards[0].data.nbytes == chunk.nbytes // mesh.size
    memory.run(StepPlan(swap_out=(SwapOut(0, (1,)),)), cache)
    assert memory._chunks[0] is not None and memory._chunks[0].sharding == chunk.sharding
    held = list(memory._chunks)
    memory.close()
    assert all(one is not None and one.is_deleted() for one in held)


def test_measuring_leaves_the_cache_as_it_is(mesh):
    memory, cache = make_memory(mesh)
    cache, out_seconds, in_seconds = memory.measure(cache)
    assert out_seconds > 0 < in_seconds and (memory.num_out, memory.num_in) == (0, 0)
    assert all(map(np.array_equal, numbers_of(cache), make_numbers()))


def test_temporaries_are_a_few_chunks(mesh):
    memory, cache = make_memory(mesh)
    on_device = memory.chunk_bytes // mesh.size
    assert memory._gather.memory_analysis().temp_size_in_bytes <= 2 * on_device
    scatter = memory._scatter.memory_analysis()
    assert scatter.temp_size_in_bytes <= 2 * on_device
    assert scatter.alias_size_in_bytes >= sum(pages.nbytes for pages in jax.tree.leaves(cache)) // mesh.size


def test_a_chunk_is_so_many_tokens():
    assert [chunk_blocks(size) for size in (16, 32, 128, 256, 1024)] == [16, 8, 2, 1, 1]


def test_more_is_staged_on_large_devices():
    assert staged_chunks(None, 32 << 20) == FEWEST_STAGED == staged_chunks(1 << 30, 32 << 20)
    assert staged_chunks(24 << 30, 32 << 20) == 12 and staged_chunks(126 << 30, 32 << 20) == MOST_STAGED
