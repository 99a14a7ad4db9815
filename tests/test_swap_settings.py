"""What a user can say about swapping, what becomes of it, and where the figures are shown."""

from __future__ import annotations

import dataclasses
import os

import jax
import pytest
from jax._src import xla_bridge

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.memory import GIB, MemoryBudget
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.mesh import HOST_LIMIT, MEMORY_FRACTIONS, prepare_devices
from jaxllm.runner.kv_cache import CachePlan
from jaxllm.serving.metrics import Metrics

MODEL = ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072, dtype="bfloat16")
CHUNK = 256 * 131072
"""Bytes of 256 tokens."""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"swap_space": -1}, "swap_space=-1 is not an amount of memory: use GiB per device, or 0 for none"),
        ({"swap_space": True}, "swap_space=True is not an amount"),
        ({"swap_space": "4"}, "swap_space='4' is not an amount"),
        ({"swap_space": float("inf")}, "swap_space=inf is not an amount"),
        ({"preemption_mode": "drop"}, "preemption_mode='drop' is unknown: use one of auto, swap, recompute"),
        ({"preemption_mode": "swap", "swap_space": 0}, "preemption_mode='swap' needs host memory, and swap_space=0"),
    ],
)
def test_what_is_wrong_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig("m", **fields)


def test_more_than_the_machine_has_is_refused_before_anything_is_made():
    config = EngineConfig("m", swap_space=1e9).resolve(dataclasses.replace(MODEL, max_position_embeddings=1024), "gpu")
    with pytest.raises(ValueError, match=r"swap_space=1000000000.0 asks for .* and the machine has .*: lower it"):
        _ = CachePlan(config, MODEL, 2, None).host_chunks


def test_a_gpu_has_swap_space_by_default_and_a_cpu_has_none():
    model = dataclasses.replace(MODEL, max_position_embeddings=1024)
    assert EngineConfig("m").resolve(model, "gpu").swap_space == 4
    assert EngineConfig("m").resolve(model, "cpu").swap_space == 0
    assert EngineConfig("m", swap_space=0.5).resolve(model, "cpu").swap_space == 0.5


def plan(budget: MemoryBudget | None = None, **fields) -> CachePlan:
    return CachePlan(EngineConfig("m", max_model_len=1024, max_num_seqs=256, **fields), MODEL, 2, budget)


def test_host_memory_is_counted_in_chunks_of_256_tokens():
    size = plan(num_gpu_blocks_override=100, swap_space=4).size()
    assert (size.host_chunks, size.chunk_blocks, size.chunk_tokens) == (4 * GIB // CHUNK, 16, 256)
    assert plan(swap_space=4, tensor_parallel_size=2).host_chunks == 8 * GIB // CHUNK, "per device"
    assert plan(swap_space=4, block_size=64).chunk_bytes == CHUNK
    assert plan(swap_space=CHUNK / GIB).host_chunks == 1
    assert plan(swap_space=0.9 * CHUNK / GIB).host_chunks == plan().host_chunks == 0
    with pytest.raises(ValueError, match=r"swap_space=0.01 GiB holds no 32.0 MiB of K/V, .* raise swap_space, or use"):
        plan(num_gpu_blocks_override=100, swap_space=0.01, preemption_mode="swap").size()


def test_what_is_on_its_way_takes_memory_from_the_cache():
    budget = MemoryBudget(100 * GIB, 16 * GIB, state=0, temp=0)
    staged = dataclasses.replace(budget, staged=10 * GIB)
    assert budget.for_cache - staged.for_cache == 10 * GIB
    with pytest.raises(ValueError, match=r"98\.2 GiB of temporaries"):
        plan(dataclasses.replace(budget, staged=98 * GIB)).size()


def test_xla_is_told_of_much_host_memory_before_it_starts(monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setenv(MEMORY_FRACTIONS[0], "0.9")
    monkeypatch.delenv(HOST_LIMIT, raising=False)
    for fields in ({}, {"swap_space": 28, "tensor_parallel_size": 2}):
        prepare_devices(EngineConfig("m", **fields))
        assert HOST_LIMIT not in os.environ
    prepare_devices(EngineConfig("m", swap_space=30, tensor_parallel_size=2))
    assert os.environ.pop(HOST_LIMIT) == "68"
    monkeypatch.setenv(HOST_LIMIT, "200")
    prepare_devices(EngineConfig("m", swap_space=100))
    assert os.environ[HOST_LIMIT] == "200", "what the user set is left alone"
    assert jax.default_backend() == "cpu"


def test_metrics_have_the_names_of_vllm():
    stats = EngineStats(
        num_waiting=2, num_swapped=3, host_cache_usage=0.25, host_cache_hits=32, bytes_swapped_out=5, bytes_swapped_in=4
    )
    lines = Metrics("m").render(stats, 0, with_vllm_names=True).splitlines()
    for name, value in (
        ("num_requests_waiting", 2),
        ("num_requests_swapped", 3),
        ("cpu_cache_usage_perc", 0.25),
        ("cpu_prefix_cache_hits_total", 32),
        ("swapped_out_bytes_total", 5),
        ("swapped_in_bytes_total", 4),
    ):
        for prefix in ("jaxllm", "vllm"):
            assert f'{prefix}:{name}{{model_name="m"}} {float(value)}' in lines
