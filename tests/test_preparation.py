"""Block copies, and the history and the tables of a seat, on one device and spread over two."""

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
from jaxllm.runner.device_state import ANY_TOKEN, EXCLUDED, IN_PROMPT, NO_TOKEN, ONCE, Tables, state_specs
from jaxllm.runner.kv_cache import allocate
from jaxllm.runner.preparation import COPIES_PER_CALL, Preparation
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


def make_row(seat: int, prompt, start: int, admitted: bool = True, **params) -> PlanRow:
    request = prompt_request(str(seat), prompt, 5, **params)
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


def make_words(allowed, prompt, answer):
    """A seat's history, token by token."""
    words = np.full(VOCAB, EXCLUDED if allowed else 0, np.uint16)
    words[allowed] = 0
    for token in prompt:
        words[token] |= IN_PROMPT
    for token in answer:
        words[token] += ONCE
    return words


@pytest.mark.parametrize("allowed", [[], [5, 17, VOCAB - 1]])
@pytest.mark.parametrize("start", [0, 7], ids=["nothing cached", "a part cached"])
def test_a_seat_gets_the_history_of_its_request_and_no_other_seat_does(mesh, start, allowed):
    preparation, cache, state = make_preparation(mesh)
    before = np.random.default_rng(1).integers(0, 2**16, (SEATS + 1, VOCAB), np.uint16)
    state = state._replace(history=jax.device_put(before, state.history.sharding))
    prompt, answer = [3, 5, 5, VOCAB - 1, *range(100, 110)], [5, 17, 5, 9, 5]
    row = make_row(1, prompt, start, presence_penalty=1.0, allowed_token_ids=allowed or None)
    row.request.output_ids = answer
    _, state = preparation.run(StepPlan((row,)), cache, state)
    expected = before.copy()
    expected[1] = make_words(allowed, prompt, answer)
    assert np.array_equal(state.history, expected)


def test_a_seat_gets_the_tables_of_its_request(mesh):
    preparation, cache, state = make_preparation(mesh)
    row = make_row(2, [1, 2, 3], 0, logit_bias={7: 1.5, 8: -2}, bad_words=["some", "words"])
    row.request.bad_word_ids = ((4,), (5, 6, 7))
    row.request.output_ids = list(range(40))
    _, state = preparation.run(StepPlan((row,)), cache, state)
    tables = Tables(*(np.asarray(field) for field in state.tables))
    assert tables.bias_ids[2, :3].tolist() == [7, 8, VOCAB] and tables.biases[2, :3].tolist() == [1.5, -2, 0]
    assert tables.bad_words[2, 0].tolist() == [ANY_TOKEN] * 15 + [4]
    assert tables.bad_words[2, 1].tolist() == [ANY_TOKEN] * 13 + [5, 6, 7]
    assert (tables.bad_words[2, 2:, -1] == VOCAB).all()
    assert tables.recent[2].tolist() == list(range(25, 40))
    row.request.output_ids = [1, 2]
    _, state = preparation.run(StepPlan((row,)), cache, state)
    assert state.tables.recent[2].tolist() == [NO_TOKEN] * 13 + [1, 2]
    assert not any(np.asarray(field[1]).any() for field in state.tables), "another seat's"


@pytest.mark.parametrize(
    "row",
    [
        make_row(1, [1, 2, 3], start=2),
        make_row(1, [1, 2, 3], start=2, logprobs=3),
        make_row(1, [1, 2, 3], start=2, repetition_penalty=1.5, admitted=False),
    ],
    ids=["nothing asked", "only log-probabilities", "seated before"],
)
def test_a_step_that_needs_nothing_does_nothing(row):
    preparation, cache, state = make_preparation(Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,)))
    assert preparation.run(StepPlan((row,)), cache, state) == (cache, state)
    compiled = {"_copy_blocks", "_set_history", "_set_tables"} & vars(preparation).keys()
    assert not compiled, "something was compiled"


def test_compiling_ahead_of_time_leaves_nothing_to_compile():
    preparation, cache, state = make_preparation(Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,)))
    preparation.compile()
    compiled = dict(vars(preparation))
    row = make_row(1, [1, 2, 3], start=2, repetition_penalty=1.5, logit_bias={1: 1})
    preparation.run(StepPlan((row,), (BlockCopy(1, 2),)), cache, state)
    assert vars(preparation) == compiled
