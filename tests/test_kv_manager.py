"""Tests of block tables: growth, what the device is told, and giving blocks back."""

from __future__ import annotations

import pytest
from doubles import make_request

from jaxllm.config import CacheSize
from jaxllm.scheduling.kv_manager import NO_NEW_BLOCKS, KVManager


@pytest.fixture
def kv() -> KVManager:
    return KVManager(CacheSize(num_blocks=9, block_size=4))


def test_a_table_grows_by_the_blocks_that_are_missing(kv: KVManager):
    request = make_request("a", 10, 5)
    assert [kv.num_new_blocks(request, end) for end in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    first = kv.grow(request, 5)
    assert first is not None and first.first == 0 and len(first.ids) == 2
    assert request.num_slots == 8
    assert kv.num_new_blocks(request, 8) == 0 and kv.num_new_blocks(request, 9) == 1
    second = kv.grow(request, 9)
    assert second is not None and second.first == 2 and len(second.ids) == 1
    assert kv.block_ids(request) == first.ids + second.ids
    kv.check_invariants()


def test_nothing_is_new_while_there_is_room(kv: KVManager):
    request = make_request("a", 10, 5)
    kv.grow(request, 5)
    assert kv.grow(request, 8) is kv.grow(request, 3) is NO_NEW_BLOCKS


def test_growth_is_all_or_nothing(kv: KVManager):
    large, small = make_request("a", 30, 2), make_request("b", 5, 5)
    kv.grow(large, 24)
    assert kv.num_free_blocks == 2
    assert kv.grow(small, 9) is None
    assert kv.grow(large, 33) is None
    assert kv.num_free_blocks == 2 and kv.block_ids(small) == () and small.num_slots == 0
    assert kv.holders() == {"a"}
    kv.check_invariants()


def test_after_a_request_was_freed_all_of_its_blocks_are_new(kv: KVManager):
    request = make_request("a", 10, 5)
    kv.grow(request, 10)
    kv.free(request)
    assert kv.num_used_blocks == 0 and kv.block_ids(request) == () and request.num_slots == 0
    again = kv.grow(request, 10)
    assert again is not None and again.first == 0 and again.ids == kv.block_ids(request)
    kv.check_invariants()


def test_freeing_a_request_without_blocks_changes_nothing(kv: KVManager):
    kv.free(make_request("a", 10, 5))
    assert kv.num_free_blocks == kv.num_blocks == 8


def test_requests_never_hold_the_same_block(kv: KVManager):
    one, two = make_request("a", 9, 5), make_request("b", 9, 5)
    for end in (4, 8, 12):
        kv.grow(one, end)
        kv.grow(two, end)
    assert not set(kv.block_ids(one)) & set(kv.block_ids(two))
    kv.check_invariants()


def test_usage_is_the_share_of_blocks_held(kv: KVManager):
    assert kv.usage == 0
    kv.grow(make_request("a", 9, 5), 8)
    assert kv.num_used_blocks == 2 and kv.usage == 0.25


def test_invariants_are_checked_against_the_tables(kv: KVManager):
    kv.grow(make_request("a", 9, 5), 8)
    kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="in no table"):
        kv.check_invariants()
