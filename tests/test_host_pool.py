"""Tests of host memory's index: names, holders, and which chunk is overwritten next; and of the rule about swapping."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.memory import SwapCosts
from jaxllm.scheduling.host_pool import HostPool
from jaxllm.scheduling.swap_rule import SwapRule


def names(text: str) -> list[bytes | None]:
    """One name per letter; a dot is no name."""
    return [None if letter == "." else letter.encode() for letter in text]


def write(pool: HostPool, text: str) -> list[int]:
    block_ids = pool.write(names(text))
    pool.check_invariants()
    return block_ids


def test_a_chunk_is_written_as_a_whole_and_the_oldest_goes_first():
    pool = HostPool(num_chunks=2, chunk_blocks=3)
    assert (pool.num_blocks, pool.room) == (6, 2)
    assert write(pool, "abc") == [0, 1, 2]
    assert write(pool, "d.") == [3, 4]
    assert [pool.find(name) for name in (b"a", b"c", b"d", b"x")] == [0, 2, 3, None]
    assert write(pool, "e") == [0], "what was there before is gone"
    assert [pool.find(name) for name in (b"a", b"b", b"e", b"d")] == [None, None, 0, 3] and pool.num_named == 2


def test_what_was_of_use_stays_longer():
    pool = HostPool(num_chunks=2, chunk_blocks=2)
    write(pool, "ab")
    write(pool, "cd")
    pool.touch(pool.find(b"b"))
    write(pool, "e")
    assert pool.find(b"a") is not None and pool.find(b"c") is None


def test_held_blocks_keep_their_chunk():
    pool = HostPool(num_chunks=2, chunk_blocks=2)
    first = write(pool, "ab")
    pool.hold([first[1]])
    assert pool.room == 1 and pool.num_held == 1
    for text in ("cd", "ef", "gh"):
        assert write(pool, text) == [2, 3]
    pool.hold(first)
    pool.release(first)
    assert pool.room == 1, "the second holder is still there"
    pool.release([first[1]])
    assert pool.room == 2 and pool.find(b"a") == 0
    assert write(pool, "ij") == [2, 3], "who was released last is overwritten last"
    pool.check_invariants()
    with pytest.raises(AssertionError, match="host block 0 is released but nobody holds it"):
        pool.release([0])


def test_a_chunk_that_nobody_can_find_is_overwritten_first():
    pool = HostPool(num_chunks=2, chunk_blocks=2)
    unnamed = write(pool, "..")
    pool.hold(unnamed)
    write(pool, "ab")
    pool.release(unnamed)
    assert write(pool, "cd") == unnamed


def test_the_same_contents_have_one_name():
    pool = HostPool(num_chunks=2, chunk_blocks=2)
    write(pool, "aa")
    other = write(pool, "a.")
    assert pool.find(b"a") == 0 and pool.num_named == 1
    pool.name(other[1], b"b")
    pool.name(other[1], b"c")
    pool.check_invariants()
    assert pool.find(b"b") == other[1] and pool.find(b"c") is None, "a block keeps its name"


def test_contents_are_forgotten_only_while_nothing_is_held():
    pool = HostPool(num_chunks=1, chunk_blocks=2)
    block_ids = write(pool, "ab")
    pool.hold(block_ids)
    with pytest.raises(AssertionError, match="in use"):
        pool.forget_contents()
    pool.release(block_ids)
    pool.forget_contents()
    pool.check_invariants()
    assert pool.find(b"a") is None and pool.room == 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["write", "hold", "release", "touch"]), st.integers(0, 11)), max_size=50))
def test_any_actions(actions):
    pool, holders = HostPool(num_chunks=4, chunk_blocks=3), [0] * 12
    contents: dict[int, bytes] = {}
    for step, (action, number) in enumerate(actions):
        if action == "hold":
            pool.hold([number])
            holders[number] += 1
        elif action == "release" and holders[number]:
            pool.release([number])
            holders[number] -= 1
        elif action == "touch":
            pool.touch(number)
        elif action == "write" and pool.room:
            block_ids = pool.write([b"%d.%d" % (step, row) for row in range(1 + number % 3)])
            assert not any(holders[block_id // 3 * 3 + row] for block_id in block_ids for row in range(3))
            contents = {key: name for key, name in contents.items() if key // 3 != block_ids[0] // 3}
            contents |= {block_id: b"%d.%d" % (step, row) for row, block_id in enumerate(block_ids)}
        pool.check_invariants()
        assert {pool.find(name): name for name in contents.values()} == contents
        assert pool.room == sum(not any(holders[3 * chunk : 3 * chunk + 3]) for chunk in range(4))


def test_the_rule():
    costs = SwapCosts(chunk_bytes=1, out_seconds=2.0, in_seconds=3.0, token_seconds=1.0)
    assert SwapRule("swap").swaps(1, 100, 100) and not SwapRule("recompute").swaps(1000, 0, 1)
    auto = SwapRule("auto", costs)
    assert not auto.swaps(5, 1, 1), "the same time"
    assert auto.swaps(6, 1, 1) and not auto.swaps(6, 1, 2)
    assert auto.swaps(6, 0, 1), "a current copy costs nothing to make"
    assert not SwapRule("auto").swaps(1000, 0, 1), "nothing was measured"
