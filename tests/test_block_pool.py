"""Tests of block ids, reference counts and the free list."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from jaxllm.scheduling.block_pool import NULL_BLOCK_ID, Block, BlockPool, FreeList


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_blocks == pool.num_free == 4
    assert NULL_BLOCK_ID not in pool.allocate(4)
    assert pool.num_free == 0
    pool.check_invariants()


def test_more_blocks_than_are_free_is_a_broken_invariant():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks are wanted, 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_the_least_recently_freed_block_is_reused_first_and_tails_before_heads():
    pool = BlockPool(7)
    first, second = pool.allocate(3), pool.allocate(3)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(6) == [*reversed(second), *reversed(first)]


def test_a_shared_block_is_free_once_every_holder_released_it():
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    pool.share(block_ids)
    pool.release(block_ids)
    assert pool.num_free == 1 and [pool.ref_count(i) for i in block_ids] == [1, 1]
    pool.release(block_ids)
    assert pool.num_free == 3
    pool.check_invariants()


def test_sharing_a_free_block_takes_it_out_of_the_middle_of_the_free_list():
    pool = BlockPool(6)
    block_ids = pool.allocate(5)
    pool.release(block_ids)
    pool.share([block_ids[2]])
    pool.check_invariants()
    assert pool.num_free == 4
    assert pool.allocate(4) == [block_ids[i] for i in (4, 3, 1, 0)]


@pytest.mark.parametrize("action", ["share", "release"])
def test_the_null_block_cannot_be_held(action: str):
    with pytest.raises(AssertionError, match="null block"):
        getattr(BlockPool(3), action)([NULL_BLOCK_ID])


def test_a_double_free_is_a_broken_invariant():
    pool = BlockPool(3)
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(block_ids)


def test_the_free_list_refuses_a_block_twice_and_one_it_does_not_have():
    free, block = FreeList(), Block(1)
    with pytest.raises(AssertionError, match="is not in the free list"):
        free.remove(block)
    free.append(block)
    with pytest.raises(AssertionError, match="already"):
        free.append(block)
    assert list(free) == [block]


@pytest.mark.parametrize("seed", range(5))
def test_random_walk(seed: int):
    rng, pool = random.Random(seed), BlockPool(20)
    tables: list[list[int]] = []
    for _ in range(300):
        action = rng.choice(["allocate", "share", "release"])
        if action == "allocate":
            tables.append(pool.allocate(rng.randint(0, pool.num_free)))
        elif action == "share" and tables:
            tables.append(list(rng.choice(tables)))
            pool.share(tables[-1])
        elif action == "release" and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        pool.check_invariants()
        holders = Counter(block_id for table in tables for block_id in table)
        assert all(pool.ref_count(block_id) == holders[block_id] for block_id in range(20))
        assert pool.num_free == 19 - len(holders)
