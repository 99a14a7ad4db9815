"""Tests of block ids, reference counts, contents and the free lists."""

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


# Contents.


def test_contents_are_found_until_the_block_is_handed_out_again():
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    pool.register(block_ids[0], b"one")
    assert pool.find(b"one") == block_ids[0] and pool.find(b"two") is None
    pool.release(block_ids)
    assert pool.find(b"one") == block_ids[0] and pool.num_cached == 1 and pool.num_free == 3
    assert block_ids[0] not in pool.allocate(2), "blocks without contents go first"
    assert pool.allocate(1) == [block_ids[0]] and pool.find(b"one") is None
    pool.check_invariants()


def test_a_free_block_that_is_found_keeps_its_contents():
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, b"one")
    pool.release([block_id])
    pool.share([block_id])
    assert pool.num_cached == 0 and pool.num_free == 2 and pool.find(b"one") == block_id
    pool.release([block_id])
    pool.check_invariants()


def test_of_two_blocks_with_the_same_contents_the_first_is_found():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, b"one")
    pool.register(second, b"one")
    pool.check_invariants()
    pool.release([first, second])
    assert pool.find(b"one") == first and pool.num_cached == 1


def test_blocks_are_counted_as_shared_from_the_second_holder_on():
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    counts = []
    for action in (pool.share, pool.share, pool.release, pool.release, pool.release):
        action(block_ids)
        counts.append(pool.num_shared)
    assert counts == [2, 2, 2, 0, 0]


def test_forgetting_contents():
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    pool.register(block_ids[1], b"one")
    with pytest.raises(AssertionError, match="in use"):
        pool.forget_contents()
    pool.release(block_ids)
    pool.forget_contents()
    assert pool.find(b"one") is None and pool.num_cached == 0 and pool.num_free == 3
    pool.check_invariants()


def test_only_a_held_block_without_contents_takes_a_hash():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="cannot take a hash"):
        pool.register(1, b"one")
    (block_id,) = pool.allocate(1)
    pool.register(block_id, b"one")
    with pytest.raises(AssertionError, match="cannot take a hash"):
        pool.register(block_id, b"two")


@pytest.mark.parametrize("seed", range(5))
def test_random_walk(seed: int):
    rng, pool = random.Random(seed), BlockPool(20)
    tables: list[list[int]] = []
    contents: dict[bytes, int] = {}
    for _ in range(500):
        action = rng.choice(["allocate", "share", "release", "register", "find"])
        if action == "allocate":
            tables.append(pool.allocate(rng.randint(0, pool.num_free)))
            contents = {name: block for name, block in contents.items() if block not in tables[-1]}
        elif action == "share" and tables:
            tables.append(list(rng.choice(tables)))
            pool.share(tables[-1])
        elif action == "release" and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif action == "register" and tables:
            name = bytes([rng.randrange(40)])
            blank = [block_id for table in tables for block_id in table if block_id not in contents.values()]
            if blank:
                pool.register(blank[0], name)
                contents.setdefault(name, blank[0])
        elif action == "find" and contents:
            tables.append([rng.choice(list(contents.values()))])
            pool.share(tables[-1])
        pool.check_invariants()
        holders = Counter(block_id for table in tables for block_id in table)
        assert all(pool.ref_count(block_id) == holders[block_id] for block_id in range(20))
        assert pool.num_free == 19 - len(holders)
        assert all(pool.find(bytes([byte])) == contents.get(bytes([byte])) for byte in range(40))
