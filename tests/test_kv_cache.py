"""How many blocks the K/V cache has, and what its arrays are."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.memory import BLOCK_ROUNDING, TEMP_ROUNDING, CacheSize, MemoryBudget
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.runner.kv_cache import CPU_CACHE_BYTES, MAX_ARRAY_ELEMENTS, CachePlan, allocate, cache_specs

MODEL = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=1 << 20,
)
BLOCK_BYTES = 2 * 2 * 3 * 16 * 4 * 16
"""K and V, layers, heads, head_dim, bytes of a float32, tokens."""
PLENTY = 1 << 50


def plan_of(available=PLENTY, itemsize=4, model=MODEL, **fields):
    """`available` is what a device has for the cache; None: nobody says."""
    budget = None if available is None else MemoryBudget(available + TEMP_ROUNDING, weights=0, state=0, temp=0)
    return CachePlan(EngineConfig("m", **fields), model, itemsize, budget)


def size_of(max_model_len=1024, max_num_seqs=4, **fields):
    size = plan_of(max_model_len=max_model_len, max_num_seqs=max_num_seqs, **fields).size()
    assert size.block_size == fields.get("block_size", 16)
    return size


@pytest.mark.parametrize("max_model_len", [2, 16, 17, 8192])
@pytest.mark.parametrize("max_num_seqs", [1, 5])
def test_enough_memory_holds_every_request_at_its_longest_and_the_null_block(max_model_len, max_num_seqs):
    expected = max_num_seqs * -(-max_model_len // 16) + 1
    assert size_of(max_model_len, max_num_seqs).num_blocks == expected


def test_blocks_follow_from_the_bytes_that_are_named():
    assert size_of(kv_cache_memory_bytes=100 * BLOCK_BYTES).num_blocks == 100
    assert size_of(kv_cache_memory_bytes=101 * BLOCK_BYTES - 1).num_blocks == 100
    assert size_of(kv_cache_memory_bytes=100 * BLOCK_BYTES, itemsize=2).num_blocks == 200
    assert size_of(kv_cache_memory_bytes=100 * BLOCK_BYTES, block_size=8).num_blocks == 200
    assert size_of(kv_cache_memory_bytes=100 * BLOCK_BYTES, tensor_parallel_size=3, max_num_seqs=8).num_blocks == 300


def test_bytes_that_are_named_go_before_bytes_that_are_measured():
    assert size_of(kv_cache_memory_bytes=100 * BLOCK_BYTES, available=200 * BLOCK_BYTES).num_blocks == 100


def test_measured_bytes_are_rounded_so_that_the_next_start_finds_the_same_number():
    many = {"max_num_seqs": 1000}
    for blocks in (3 * BLOCK_ROUNDING, 3 * BLOCK_ROUNDING + 1, 4 * BLOCK_ROUNDING - 1):
        assert size_of(available=blocks * BLOCK_BYTES, **many).num_blocks == 3 * BLOCK_ROUNDING
    assert size_of(available=100 * BLOCK_BYTES, **many).num_blocks == 100
    assert size_of(available=BLOCK_ROUNDING * BLOCK_BYTES, **many).num_blocks == BLOCK_ROUNDING


def test_rounding_never_takes_the_room_of_the_longest_request():
    longest = 16 * 300
    for blocks in (301, 302, 511):
        assert size_of(longest, max_num_seqs=1000, available=blocks * BLOCK_BYTES).num_blocks == 301
    with pytest.raises(
        ValueError, match=r"there are 300, 12.0 KiB are missing .*: lower max_model_len to at most 4784,"
    ):
        size_of(longest, max_num_seqs=1000, available=300 * BLOCK_BYTES)


def test_an_override_is_taken_as_it_is():
    assert size_of(num_gpu_blocks_override=777, available=0).num_blocks == 777
    assert size_of(num_gpu_blocks_override=777, kv_cache_memory_bytes=1).num_blocks == 777
    assert size_of(num_gpu_blocks_override=99_999).num_blocks == 99_999


def test_an_array_can_be_indexed_with_32_bits():
    per_block = 16 * 3 * 16
    limit = MAX_ARRAY_ELEMENTS // per_block
    assert size_of(num_gpu_blocks_override=limit).num_blocks == limit
    assert size_of(num_gpu_blocks_override=limit + 1).num_blocks == limit
    assert size_of(max_model_len=1 << 20, max_num_seqs=1000).num_blocks == limit
    assert limit * per_block < 2**31 <= (limit + 1) * per_block
    split = size_of(num_gpu_blocks_override=10 * limit, tensor_parallel_size=3)
    assert split.num_blocks == MAX_ARRAY_ELEMENTS // (per_block // 3)


def test_num_tokens_leaves_the_null_block_out():
    assert size_of(64, 1).num_tokens == 64


MEASURED = (
    "raise gpu_memory_utilization or tensor_parallel_size, lower max_num_batched_tokens, or set kv_cache_memory_bytes"
)
TOO_SMALL = {
    "blocks": ({"num_gpu_blocks_override": 10}, "", "raise num_gpu_blocks_override"),
    "bytes": ({"kv_cache_memory_bytes": 10 * BLOCK_BYTES}, "", "raise kv_cache_memory_bytes"),
    "measured": (
        {"available": 10 * BLOCK_BYTES},
        " (the engine may take 256.1 MiB, and has 0 B of weights, 256.0 MiB of temporaries, 0 B of state of requests)",
        MEASURED,
    ),
}


@pytest.mark.parametrize(("fields", "why", "remedy"), TOO_SMALL.values(), ids=TOO_SMALL)
def test_a_cache_too_small_for_one_request_says_what_is_missing_and_what_to_change(fields, why, remedy):
    with pytest.raises(ValueError) as raised:
        size_of(1000, **fields)
    assert str(raised.value) == (
        "max_model_len=1000 needs 64 K/V cache blocks of 16 tokens (1 MiB per device), but there are 10, "
        f"648.0 KiB are missing{why}: lower max_model_len to at most 144, or {remedy}"
    )


def test_weights_that_leave_nothing_are_in_the_sum_of_what_is_missing():
    budget = MemoryBudget(limit=10 << 30, weights=14 << 30, state=1 << 20, temp=300 << 20)
    plan = CachePlan(EngineConfig("m", max_model_len=16, max_num_seqs=1), MODEL, 4, budget)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "but there are 0, 4.8 GiB are missing (the engine may take 10.0 GiB, and has 14.0 GiB of weights, "
            "768.0 MiB of temporaries, 1.0 MiB of state of requests): raise gpu_memory_utilization"
        ),
    ):
        plan.size()


def test_a_cpu_has_a_default_that_can_be_raised():
    tokens = CPU_CACHE_BYTES // BLOCK_BYTES // 256 * 256 * 16
    assert size_of(available=None, max_num_seqs=10**6).num_blocks == tokens // 16
    with pytest.raises(
        ValueError, match=r"\(a CPU gives 2.0 GiB by default\): lower .*, or set kv_cache_memory_bytes$"
    ):
        size_of(1 << 24, available=None)


@pytest.mark.parametrize("fields", [{"num_gpu_blocks_override": 1}, {"kv_cache_memory_bytes": 1}, {"available": -5}])
def test_nothing_impossible_is_suggested_where_not_a_single_block_fits(fields):
    with pytest.raises(ValueError, match=r"but there are [01], [^:]*: (raise|set) ") as raised:
        size_of(1000, **fields)
    assert "lower max_model_len" not in str(raised.value)


def test_heads_that_fill_an_array_are_spread_over_more_devices():
    with pytest.raises(ValueError, match=r"lower max_model_len to at most 42991616, or raise tensor_parallel_size"):
        size_of(1 << 30, 1, block_size=1 << 20)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, MODEL.max_position_embeddings),
        ({"num_gpu_blocks_override": 10}, 144),
        ({"kv_cache_memory_bytes": 301 * BLOCK_BYTES}, 4800),
        ({"available": 511 * BLOCK_BYTES}, 255 * 16),
        ({"available": 2 * BLOCK_BYTES}, 16),
        ({"available": None}, MODEL.max_position_embeddings),
    ],
)
def test_the_longest_context_that_fits(fields, expected):
    assert plan_of(max_model_len="auto", **fields).longest_context() == expected
    assert size_of(expected, max_num_seqs=1, **fields).num_tokens >= expected
    if expected < MODEL.max_position_embeddings:
        assert size_of(expected, max_num_seqs=9, **fields).num_tokens == expected, "the plan of auto is another one"


def test_no_context_fits():
    with pytest.raises(ValueError) as raised:
        plan_of(max_model_len="auto", kv_cache_memory_bytes=BLOCK_BYTES + 1).longest_context()
    assert str(raised.value) == (
        "max_model_len='auto' finds no length that fits: the shortest needs 2 K/V cache blocks of 16 tokens "
        "(1 MiB per device), but there are 1, 12.0 KiB are missing: raise kv_cache_memory_bytes"
    )


@given(
    max_model_len=st.integers(2, 5000),
    max_num_seqs=st.integers(1, 8),
    block_size=st.sampled_from([16, 32, 128]),
    tensor_parallel_size=st.sampled_from([1, 3]),
    limit=st.one_of(
        st.builds(dict, num_gpu_blocks_override=st.integers(1, 400)),
        st.builds(dict, kv_cache_memory_bytes=st.integers(1, 4_000_000)),
        st.builds(dict, available=st.integers(-100, 4_000_000)),
    ),
)
def test_what_the_error_suggests_works(max_model_len, max_num_seqs, limit, **fields):
    """Whatever fits is granted; else the shorter max_model_len and the larger memory it names are enough."""
    try:
        size = size_of(max_model_len, max_num_seqs, **limit, **fields)
    except ValueError as error:
        message = str(error)
    else:
        assert size.num_tokens >= max_model_len
        return
    if shorter := re.search(r"at most (\d+)", message):
        size_of(int(shorter[1]), max_num_seqs, **limit, **fields)
        with pytest.raises(ValueError, match="max_model_len"):
            size_of(int(shorter[1]) + 1, max_num_seqs, **limit, **fields)
    blocks, mebibytes = (int(re.search(pattern, message)[1]) for pattern in (r"needs (\d+)", r"(\d+) MiB"))
    size_of(max_model_len, max_num_seqs, num_gpu_blocks_override=blocks, **fields)
    size_of(max_model_len, max_num_seqs, kv_cache_memory_bytes=mebibytes << 20, **fields)
    size_of(max_model_len, max_num_seqs, available=mebibytes << 20, **fields)


def test_every_layer_has_keys_and_values_split_over_heads():
    mesh = Mesh(np.array(jax.devices()[:3]), (TENSOR_AXIS,))
    specs = cache_specs(CacheSize(5, 16), MODEL, jnp.dtype(jnp.bfloat16), mesh)
    cache = allocate(specs)
    assert len(cache) == MODEL.num_layers
    for array in jax.tree.leaves(cache):
        assert array.shape == (5, 16, 3, 16) and array.dtype == jnp.bfloat16
        assert {shard.data.shape for shard in array.addressable_shards} == {(5, 16, 1, 16)}
        assert not array.any()
    addresses = {array.addressable_shards[0].data.unsafe_buffer_pointer() for array in jax.tree.leaves(cache)}
    assert len(addresses) == 4, "layers share memory"
