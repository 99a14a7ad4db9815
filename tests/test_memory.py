"""Memory as arithmetic: blocks that fit beside a model, block_size="auto", budgets."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxllm
from jaxllm.config import EngineConfig
from jaxllm.memory import (
    GIB,
    DeviceMemory,
    MemoryBudget,
    calculate_kv_cache_blocks,
    choose_block_size,
    expected_waste,
    imbalance_of,
    imbalance_percent,
    round_blocks,
    show_bytes,
)
from jaxllm.model_config import ModelConfig

MIB = 1 << 20
LLAMA_8B = ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072, dtype="bfloat16")
SMOLLM = ModelConfig("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192)


def test_blocks_beside_a_model():
    blocks = jaxllm.calculate_kv_cache_blocks(80, 14, num_kv_heads=32)
    assert (blocks, blocks * 16) == (7424, 118_784)
    assert calculate_kv_cache_blocks(80, 14) == 4 * 7424
    assert calculate_kv_cache_blocks(80, 14, block_size=32, num_kv_heads=32) == 7424 // 2 // 256 * 256
    assert calculate_kv_cache_blocks(80, 14, 16, 32, 32, 128, 2, 0.9) == blocks
    assert calculate_kv_cache_blocks(80, 14, num_kv_heads=32, dtype_size=1) == 2 * blocks


def test_blocks_are_rounded_down_but_few_are_not():
    assert calculate_kv_cache_blocks(80, 14.001, num_kv_heads=32) == 7424 - 256
    assert calculate_kv_cache_blocks(20, 17.99, num_kv_heads=32) == 1
    assert [round_blocks(blocks) for blocks in (0, 255, 256, 511, 512)] == [0, 255, 256, 256, 512]
    assert [round_blocks(511, needed) for needed in (100, 300, 511, 600)] == [256, 300, 511, 511]


def test_decimal_fractions_cost_no_blocks():
    assert 180 * 0.7 < 126, "a little less than it should be, in floating point"
    assert calculate_kv_cache_blocks(180, 14, num_kv_heads=32, gpu_memory_utilization=0.7) == 112 * 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_size_gb": 80}, "model_size_gb=80 leaves no room .* 0.9 of 80 GB and one block lack 8.0 GiB"),
        ({"gpu_memory_utilization": 0.1}, "raise gpu_memory_utilization, or split the model over more GPUs"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization=90 has to be above 0 and at most 1"),
        ({"gpu_memory_gb": float("nan")}, "gpu_memory_gb=nan has to be above 0"),
        ({"model_size_gb": -1}, "model_size_gb=-1 has to be at least 0"),
        ({"num_layers": 0}, "num_layers=0 has to be a whole number of at least 1"),
        ({"block_size": 16.0}, "block_size=16.0 has to be a whole number"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        calculate_kv_cache_blocks(**{"gpu_memory_gb": 80, "model_size_gb": 14, **arguments})


@pytest.mark.parametrize(
    ("bytes_per_token", "max_model_len", "expected"),
    [
        (128 << 10, 131072, 16),  # 8B with 8 K/V heads: 2 MiB
        (32 << 10, 131072, 64),  # the same over 4 devices
        (16 << 10, 131072, 128),
        (1, 131072, 128),
        (1, 2047, 64),
        (1, 256, 16),
        (1, 2, 16),
        (1 << 20, 131072, 16),
    ],
)
def test_block_sizes(bytes_per_token, max_model_len, expected):
    assert choose_block_size(bytes_per_token, max_model_len) == expected


@given(st.integers(1, 1 << 22), st.integers(2, 1 << 20))
def test_a_chosen_block_size_is_the_largest_that_wastes_little(bytes_per_token, max_model_len):
    def wastes_little(size):
        return size * bytes_per_token <= 2 * MIB and size * 16 <= max_model_len

    size = choose_block_size(bytes_per_token, max_model_len)
    assert size in (16, 32, 64, 128)
    assert size == 16 or wastes_little(size)
    assert size == 128 or not wastes_little(2 * size)


def test_the_expected_waste_is_the_average_over_all_lengths():
    lengths = range(1, 16 * 100 + 1)
    assert expected_waste(16) == sum(-length % 16 for length in lengths) / len(lengths)


def test_auto_block_size_becomes_a_number_and_says_what_it_wastes(caplog):
    with caplog.at_level(logging.INFO, "jaxllm.config"):
        assert EngineConfig("m", block_size="auto").resolve(SMOLLM, "cpu").block_size == 32
    assert caplog.messages == [
        "block_size='auto' is 32: a token takes 45.0 KiB on a device; a request wastes 15.5 tokens of its last block "
        "on average, 697.5 KiB, which is 0.19 % of 8192 tokens"
    ]
    assert EngineConfig("m", block_size="auto").resolve(SMOLLM, "gpu").block_size == 64, "half the bytes in bfloat16"
    assert EngineConfig("m", block_size="auto").resolve(LLAMA_8B, "gpu").block_size == 16
    assert EngineConfig("m", block_size="auto", tensor_parallel_size=8).resolve(LLAMA_8B, "gpu").block_size == 128
    assert EngineConfig("m", block_size="auto", max_model_len=300).resolve(SMOLLM, "gpu").block_size == 16
    assert EngineConfig("m").resolve(SMOLLM, "gpu").block_size == 16


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_auto_max_model_len_waits_for_what_fits(platform):
    assert EngineConfig("m", max_model_len="auto").resolve(SMOLLM, platform).max_model_len == "auto"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": "long"}, "max_model_len='long' has to be a whole number of at least 1 or 'auto'"),
        ({"block_size": "big"}, "block_size='big' has to be a whole number of at least 1 or 'auto'"),
        ({"block_size": None}, "block_size=None has to be a whole number"),
        ({"block_size": 48}, "block_size=48 is not a power of two: use 16, 32, 64 or 128, or 'auto'"),
        ({"max_num_seqs": "auto"}, "max_num_seqs='auto' has to be a whole number of at least 1$"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0 has to be"),
        ({"tensor_parallel_size": None}, "tensor_parallel_size=None has to be"),
    ],
)
def test_fields_of_the_wrong_kind(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig("m", **fields)


def test_a_budget_sets_temporaries_aside_and_does_not_follow_their_every_byte():
    budget = MemoryBudget(limit=72 * GIB, weights=14 * GIB, state=40 * MIB, temp=300 * MIB)
    assert budget.for_cache == 72 * GIB - 14 * GIB - 40 * MIB - 768 * MIB
    again = MemoryBudget(limit=72 * GIB, weights=14 * GIB, state=40 * MIB, temp=310 * MIB)
    assert again.for_cache == budget.for_cache
    assert MemoryBudget(limit=GIB, weights=2 * GIB, state=0, temp=0).for_cache < 0


def test_imbalance():
    assert imbalance_percent([7]) == imbalance_percent([3, 3, 3]) == imbalance_percent([0, 0]) == 0
    assert imbalance_percent([100, 150, 50]) == pytest.approx(50)


@pytest.mark.parametrize(("sizes", "warns"), [((100, 100), False), ((110, 90), False), ((112, 88), True)])
def test_uneven_devices_are_reported(sizes, warns, caplog):
    devices = [DeviceMemory(f"gpu:{index} H200", size, 0, 0, 0, None, None) for index, size in enumerate(sizes)]
    assert imbalance_of(devices) == pytest.approx(sizes[0] - 100)
    assert ("gpu:0 H200 holds 112 B, 12 % more than devices do on average" in caplog.text) is warns


def test_sizes_in_words():
    sizes = (0, 1023, 1024, 1536, MIB, 5 * GIB // 2)
    assert [show_bytes(size) for size in sizes] == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "2.5 GiB"]
