"""Looking inside a running engine: memory, blocks, requests; as data and as tables."""

from __future__ import annotations

import json

import jax
import pytest
from tiny_model import write_model

from jaxllm import LLM, SamplingParams
from jaxllm.debug import debug_sequence_states, memory_stats, print_memory_stats, print_sequence_states

DEVICES = 3
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BLOCK_BYTES = 2 * 2 * 3 * 16 * 4 * 16 // DEVICES


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("debug") / "tiny")
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_steps_in_flight": 1, "enforce_eager": True}
    with LLM(
        str(folder), tensor_parallel_size=DEVICES, num_gpu_blocks_override=21, compilation_cache=False, **options
    ) as llm:
        yield llm


def enter(engine, **prompts):
    for name, prompt in prompts.items():
        engine.add_request(name, list(prompt), PARAMS)


@pytest.fixture
def idle(llm):
    """The engine, without anything in its cache before, and with nothing running afterwards."""
    llm.engine.core.scheduler.kv.reset_prefix_cache()
    yield llm.engine
    for state in debug_sequence_states(llm):
        llm.engine.abort_request(state.request_id)


@pytest.fixture
def engine(idle):
    """Two requests run (of 20 and 17 prompt tokens, after two steps), one waits."""
    enter(idle, a=range(20), b=range(100, 117), c=range(5))
    idle.step()
    idle.step()
    return idle


def test_requests_as_the_scheduler_sees_them(engine):
    states = debug_sequence_states(engine)
    assert [(state.request_id, state.status) for state in states] == [
        ("a", "running"),
        ("b", "running"),
        ("c", "waiting"),
    ]
    a, b, c = states
    # 32 tokens a step: 20 of a and 12 of b, then 1 of a and 5 of b.
    assert [(state.num_computed, state.num_tokens) for state in states] == [(21, 22), (17, 18), (0, 5)]
    assert [len(state.block_ids) for state in states] == [2, 2, 0]
    assert len({*a.block_ids, *b.block_ids}) == 4
    assert len(a.last_token_ids) == 10 and a.last_token_ids[:8] == tuple(range(12, 20))
    assert c.last_token_ids == (0, 1, 2, 3, 4)
    assert all(state.num_preemptions == 0 and 0 <= state.age < 600 for state in states)
    assert a.age >= b.age >= c.age
    assert json.loads(json.dumps(a.to_dict()))["last_token_ids"] == list(a.last_token_ids)


def test_blocks_by_what_they_hold(engine):
    pool = memory_stats(engine).pool
    assert (pool.total_blocks, pool.block_size) == (20, 16)
    assert (pool.free_blocks, pool.cached_blocks, pool.used_blocks, pool.shared_blocks) == (16, 0, 4, 0)
    assert pool.used_tokens == 21 + 17
    assert pool.waste_percent == pytest.approx(100 * (64 - 38) / 64)


def test_shared_and_cached_blocks(idle):
    enter(idle, a=range(20))
    idle.step()
    before = memory_stats(idle).pool.prefix_cache
    enter(idle, b=range(20))
    idle.step()
    pool = memory_stats(idle).pool
    assert (pool.free_blocks, pool.cached_blocks, pool.used_blocks, pool.shared_blocks) == (17, 0, 3, 1)
    assert pool.used_tokens == 16 + 5 + 4 and pool.waste_percent == pytest.approx(100 * (48 - 25) / 48)
    assert (pool.prefix_cache.queries - before.queries, pool.prefix_cache.hits - before.hits) == (20, 16)
    for name in "ab":
        idle.abort_request(name)
    pool = memory_stats(idle).pool
    assert (pool.free_blocks, pool.cached_blocks, pool.used_blocks, pool.shared_blocks) == (20, 1, 0, 0)
    assert json.loads(json.dumps(memory_stats(idle).to_dict()))["pool"]["prefix_cache"]["hits"] >= 16


def test_bytes_by_device(llm, engine):
    stats = llm.memory_stats()
    assert stats.devices == memory_stats(engine).devices and len(stats.devices) == DEVICES
    runner = engine.core.runner
    held = jax.tree.leaves((runner.params, runner.cache, runner.state))
    for device, memory in zip(runner.mesh.devices.flat, stats.devices, strict=True):
        assert memory.device.startswith(f"cpu:{device.id}")
        arrays = [shard.data.nbytes for array in held for shard in array.addressable_shards if shard.device == device]
        assert memory.weights + memory.kv_cache + memory.state == sum(arrays)
        assert memory.kv_cache == 21 * BLOCK_BYTES
        assert memory.temp > 0 and memory.total == sum(arrays) + memory.temp
        assert memory.in_use is memory.limit is None, "a CPU does not say"
    assert stats.imbalance_percent == 0
    assert json.loads(json.dumps(stats.to_dict()))["devices"][2]["kv_cache"] == 21 * BLOCK_BYTES


def test_looking_changes_nothing(engine):
    before = debug_sequence_states(engine)
    print_memory_stats(engine)
    print_sequence_states(engine)
    after = debug_sequence_states(engine)
    assert [state.to_dict() | {"age": 0} for state in before] == [state.to_dict() | {"age": 0} for state in after]


def test_tables(llm, engine, capsys):
    llm.print_memory_stats()
    print_sequence_states(llm)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["20", "16", "4", "0", "38", "40.6", "%", "16", "0"] in lines
    assert sum(line[:1] == [f"cpu:{index}"] for index in range(DEVICES) for line in lines) == DEVICES
    assert any(
        line[:5] == ["a", "running", "2", "21/22", "0"] and line[-10:-2] == [*map(str, range(12, 20))] for line in lines
    )
    assert any(line[:4] == ["c", "waiting", "0", "0/5"] for line in lines)


def test_nothing_runs(idle):
    assert debug_sequence_states(idle) == []
    pool = memory_stats(idle).pool
    assert (pool.free_blocks, pool.used_tokens, pool.waste_percent) == (20, 0, 0.0)


def test_a_closed_engine_holds_nothing(tmp_path):
    llm = LLM(str(write_model(tmp_path / "tiny")), max_num_seqs=1, enforce_eager=True, compilation_cache=False)
    llm.close()
    assert [device.total for device in llm.memory_stats().devices] == [0]
