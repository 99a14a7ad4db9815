"""Block copies and the tokens a request with a penalty has seen, on one device and spread over two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import prompt_request
from jax.sharding import Mesh

from jaxllm.models.attention import LayerCache
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.parallel.sharding import KV_CACHE_AXES, named_sharding
from jaxllm.runner.device_state import state_specs
from jaxllm.runner.kv_cache import allocate
from jaxllm.runner.preparation import COPIES_PER_CALL, TOKENS_PER_CALL, Preparation
from jaxllm.scheduling.plan import BlockCopy, PlanRow, StepPlan

SHAPE = (60, 4, 2, 8)
SEATS, VOCAB, NUM_LAYERS = 3, 3000, 2


@pytest.fixture(params=[1, 2], ids=["one device", "two devices"])
def mesh(request):
    return Mesh(np.array(jax.devices()[: request.param]), (TENSOR_AXIS,))


def make_numbers() -> list[np.ndarray]:
    """Keys and values of all layers, every number of which is another."""
    size = int(np.prod(SHAPE))
    return [np.arange(size, dtype=np.float32).reshape(SHAPE) + size * part for part in range(2 * NUM_LAYERS)]


def make_preparation(mesh: Mesh):
    """With its cache and its state."""
    spec = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=named_sharding(mesh, KV_CACHE_AXES))
    specs = tuple(LayerCache(spec, spec) for _ in range(NUM_LAYERS)), state_specs(SEATS, 5, VOCAB, mesh)
    placed = [jax.device_put(numbers, spec.sharding) for numbers in make_numbers()]
    cache = tuple(LayerCache(*placed[2 * layer : 2 * layer + 2]) for layer in range(NUM_LAYERS))
    return Preparation(*specs), cache, allocate(specs[1])


def make_row(seat: int, prompt, start: int, penalty: float = 1.5, admitted: bool = True) -> PlanRow:
    request = prompt_request(str(seat), prompt, 5, repetition_penalty=penalty)
    return PlanRow(request, seat, start, 1, len(prompt), 0, (1,), admitted, samples=False)


@pytest.mark.parametrize("num_copies", [1, COPIES_PER_CALL, COPIES_PER_CALL + 3])
def test_blocks_are_copied_in_every_layer_and_no_other_is_touched(mesh, num_copies):
    preparation, cache, state = make_preparation(mesh)
    sharding = cache[0].keys.sharding
    blocks = np.random.default_rng(num_copies).permutation(SHAPE[0])
    copies = tuple(BlockCopy(*map(int, pair)) for pair in blocks[: 2 * num_copies].reshape(-1, 2))
    expected = make_numbers()
    for pages in expected:
        for source, destination in copies:
            pages[destination] = pages[source]
    given = cache
    cache, _ = preparation.run(StepPlan((), copies), cache, state)
    assert all(pages.is_deleted() for pages in jax.tree.leaves(given)), "the cache was copied, not updated"
    assert all(map(np.array_equal, jax.tree.leaves(cache), expected))
    assert cache[0].keys.sharding == sharding


def test_the_temporaries_of_a_copy_are_a_few_blocks(mesh):
    preparation, cache, _ = make_preparation(mesh)
    block_bytes = cache[0].keys[0].nbytes
    analysis = preparation._copy_blocks.memory_analysis()
    assert analysis.temp_size_in_bytes <= 2 * 2 * NUM_LAYERS * COPIES_PER_CALL * block_bytes
    assert analysis.alias_size_in_bytes >= sum(pages.nbytes for pages in jax.tree.leaves(cache)) // mesh.size


@pytest.mark.parametrize("length", [1, 7, 2 * TOKENS_PER_CALL + 300])
def test_a_seat_has_seen_what_was_cached_of_its_request_and_nothing_else(mesh, length):
    preparation, cache, state = make_preparation(mesh)
    before = np.random.default_rng(1).random((SEATS + 1, VOCAB)) < 0.5
    state = state._replace(seen=jax.device_put(before, state.seen.sharding))
    prompt = [*np.random.default_rng(2).integers(0, VOCAB, length).tolist(), *[VOCAB - 1] * 2]
    prompt = [token % (VOCAB - 1) for token in prompt[:length]] + prompt[length:]
    _, state = preparation.run(StepPlan((make_row(1, prompt, start=length),)), cache, state)
    expected = before.copy()
    expected[1] = False
    expected[1, prompt[:length]] = True
    assert np.array_equal(state.seen, expected)


@pytest.mark.parametrize(
    "row",
    [
        make_row(1, [1, 2, 3], start=0),
        make_row(1, [1, 2, 3], start=2, penalty=1.0),
        make_row(1, [1, 2, 3], start=2, admitted=False),
    ],
    ids=["nothing cached", "no penalty", "seated before"],
)
def test_a_step_that_needs_nothing_does_nothing(row):
    preparation, cache, state = make_preparation(Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,)))
    assert preparation.run(StepPlan((row,)), cache, state) == (cache, state)
    assert "_copy_blocks" not in vars(preparation) and "_set_seen" not in vars(preparation), "something was compiled"


def test_compiling_ahead_of_time_leaves_nothing_to_compile():
    preparation, cache, state = make_preparation(Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,)))
    preparation.compile()
    compiled = dict(vars(preparation))
    preparation.run(StepPlan((make_row(1, [1, 2, 3], start=2),), (BlockCopy(1, 2),)), cache, state)
    assert vars(preparation) == compiled
