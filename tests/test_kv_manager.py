"""Tests of block tables: admission, growth, what is shared, what can be found again, and giving blocks back."""

from __future__ import annotations

import pytest
from doubles import make_request, prompt_request

from jaxllm.memory import CacheSize
from jaxllm.request import Request
from jaxllm.scheduling.kv_manager import NO_NEW_BLOCKS, KVManager
from jaxllm.scheduling.kv_stats import PrefixCacheStats
from jaxllm.scheduling.plan import BlockCopy


@pytest.fixture
def kv() -> KVManager:
    return KVManager(CacheSize(num_blocks=9, block_size=4))


def compute(kv: KVManager, request: Request, end: int | None = None) -> tuple[int, ...]:
    """Admits a request and lets it compute its tokens up to `end`; its blocks."""
    end = request.num_tokens if end is None else end
    assert kv.admit(request) is not None
    assert kv.grow(request, end) is not None
    request.num_computed = end
    return kv.block_ids(request)


# Admission and growth.


def test_an_admitted_request_has_blocks_for_all_of_its_tokens(kv: KVManager):
    request = make_request("a", 10, 5)
    table = kv.admit(request)
    assert table is not None and table.first == 0 and len(table.ids) == 3
    assert kv.block_ids(request) == table.ids and request.num_computed == request.num_slots == 0
    assert kv.grow(request, 5) is NO_NEW_BLOCKS and request.num_slots == 8
    assert kv.grow(request, 10) is NO_NEW_BLOCKS and request.num_slots == 12
    grown = kv.grow(request, 13)
    assert grown is not None and grown.first == 3 and len(grown.ids) == 1 and request.num_slots == 16
    kv.check_invariants()


def test_admission_and_growth_are_all_or_nothing(kv: KVManager):
    large, small = make_request("a", 24, 8), make_request("b", 9, 5)
    assert kv.admit(large) and kv.num_free_blocks == 2
    assert kv.admit(small) is None and kv.block_ids(small) == () and small.num_slots == 0
    assert kv.grow(large, 33) is None and kv.num_free_blocks == 2
    assert kv.grow(large, 32) is not None and kv.num_free_blocks == 0
    assert kv.holders() == {"a"}
    kv.check_invariants()


def test_a_reserve_stays_free(kv: KVManager):
    assert kv.admit(make_request("a", 24, 5), reserve=3) is None
    assert kv.admit(make_request("a", 24, 5), reserve=2) is not None
    assert kv.admit(make_request("b", 1, 5), reserve=2) is None


def test_free_blocks_that_are_shared_do_not_count_as_room(kv: KVManager):
    """Seven of eight blocks are cached; with all of them revived, one is left for a request that lacks two."""
    first = make_request("a", 29, 2, family=0)
    compute(kv, first, 28)
    kv.free(first)
    assert kv.stats().cached_blocks == 7
    assert kv.admit(make_request("b", 33, 1, family=0)) is None
    kv.check_invariants()
    assert kv.admit(make_request("b", 32, 1, family=0)) is not None and kv.num_free_blocks == 0


def test_freeing_a_request_without_blocks_changes_nothing(kv: KVManager):
    kv.free(make_request("a", 10, 5))
    assert kv.num_free_blocks == kv.num_blocks == 8


def test_requests_with_other_prompts_never_hold_the_same_block(kv: KVManager):
    one, two = make_request("a", 9, 5), make_request("b", 10, 5)
    assert not set(compute(kv, one)) & set(compute(kv, two))
    kv.check_invariants()


# What is found again.


def test_a_freed_request_finds_its_full_blocks_again(kv: KVManager):
    request = make_request("a", 10, 5)
    before = compute(kv, request)
    kv.free(request)
    assert kv.num_used_blocks == 0 and kv.block_ids(request) == () and request.num_slots == 0
    again = kv.admit(request)
    assert again is not None and again.first == 0 and again.ids[:2] == before[:2]
    assert request.num_computed == 8


@pytest.mark.parametrize(("prompt_len", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_the_last_token_is_always_left_to_compute(kv: KVManager, prompt_len: int, cached: int):
    compute(kv, make_request("a", 12, 5, family=1))
    request = make_request("b", prompt_len, 5, family=1)
    kv.admit(request)
    assert request.num_computed == cached
    kv.check_invariants()


def test_blocks_are_shared_as_soon_as_their_tokens_are_being_computed(kv: KVManager):
    first, second = make_request("a", 12, 5, family=1), make_request("b", 12, 5, family=1)
    ids = compute(kv, first, end=6)
    assert kv.admit(second) and second.num_computed == 4, "a chunk of 6 tokens fills one block"
    assert kv.block_ids(second)[0] == ids[0] and not set(kv.block_ids(second)[1:]) & set(ids)
    kv.check_invariants()


def test_what_follows_another_beginning_is_not_the_same(kv: KVManager):
    compute(kv, prompt_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 5))
    for prompt, cached in (([1, 2, 3, 4, 5, 6, 7, 8, 9], 8), ([1, 2, 3, 4, 5, 0, 7, 8, 9], 4), ([5, 6, 7, 8, 9], 0)):
        request = prompt_request("b", prompt, 5)
        kv.admit(request)
        assert request.num_computed == cached
        kv.free(request)


def test_only_requests_with_the_same_salt_share(kv: KVManager):
    requests = {salt: make_request(str(salt), 9, 5) for salt in (None, "x", "y")}
    for salt, request in requests.items():
        request.cache_salt = salt
    compute(kv, requests["x"])
    for salt, cached in ((None, 0), ("y", 0)):
        kv.admit(requests[salt])
        assert requests[salt].num_computed == cached
        kv.free(requests[salt])
    kv.free(requests["x"])
    kv.admit(requests["x"])
    assert requests["x"].num_computed == 8


def test_the_answers_tokens_are_found_once_the_host_knows_them(kv: KVManager):
    request = prompt_request("a", [1, 2, 3, 4, 5, 6], 9)
    compute(kv, request)
    request.num_tokens = 9  # three tokens were sampled, none of them was read, and the device computed two
    kv.grow(request, 8)
    request.num_computed = 8
    follow_up = prompt_request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9], 5)
    kv.admit(follow_up)
    assert follow_up.num_computed == 4
    kv.free(follow_up)
    for token_id in (7, 8, 9):
        request.append_tokens([token_id], [0.0])
    kv.free(request)
    kv.admit(follow_up)
    assert follow_up.num_computed == 8


def test_a_block_with_unknown_tokens_is_not_registered_when_its_request_is_freed(kv: KVManager):
    request = prompt_request("a", [1, 2, 3, 4, 5, 6], 9)
    compute(kv, request)
    request.num_tokens, request.num_computed = 9, 8
    kv.free(request)
    assert kv.stats().cached_blocks == 1


def test_a_block_that_is_known_but_not_computed_is_not_registered(kv: KVManager):
    request = make_request("a", 12, 5, family=1)
    kv.admit(request)
    kv.grow(request, 5)
    request.num_computed = 5
    kv.free(request)
    assert kv.stats().cached_blocks == 1


def test_contents_are_forgotten_when_memory_is_needed_tails_first(kv: KVManager):
    compute(kv, first := make_request("a", 20, 5, family=1))
    kv.free(first)
    compute(kv, second := make_request("b", 16, 5, family=2))  # three blank blocks and the tail of the first
    kv.free(second)
    for family, cached in ((1, 16), (2, 12)):  # the new block of the first takes the tail of the second
        request = make_request("c", 20, 5, family=family)
        kv.admit(request)
        assert request.num_computed == cached
        kv.free(request)
    kv.check_invariants()


def test_nothing_is_found_without_prefix_caching():
    kv = KVManager(CacheSize(num_blocks=9, block_size=4), enable_prefix_caching=False)
    compute(kv, first := make_request("a", 12, 5))
    kv.free(first)
    kv.admit(first)
    assert first.num_computed == 0 and first.block_hashes == []
    assert kv.stats().cached_blocks == 0


def test_resetting_forgets_everything_but_only_while_nothing_is_held(kv: KVManager):
    compute(kv, request := make_request("a", 12, 5))
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert kv.stats().cached_blocks == 3
    assert kv.reset_prefix_cache()
    assert kv.stats().cached_blocks == 0 and kv.num_free_blocks == 8
    kv.admit(request)
    assert request.num_computed == 0
    kv.check_invariants()


# Forks.


def fork(kv: KVManager, parent: Request, end: int | None = None) -> Request:
    """A running parent's child."""
    parent.fork({"child": 1})
    compute(kv, parent, end)
    parent.seat = 0
    return parent.children[0]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(
    ("prompt_len", "num_shared", "copies"), [(1, 0, False), (3, 0, True), (5, 1, False), (8, 1, True), (10, 2, True)]
)
def test_a_fork_shares_full_blocks_and_gets_a_copy_of_the_begun_one(
    enable_prefix_caching, prompt_len, num_shared, copies
):
    kv = KVManager(CacheSize(num_blocks=9, block_size=4), enable_prefix_caching)
    child = fork(kv, parent := make_request("a", prompt_len, 5))
    table = kv.admit(child)
    assert table is not None and child.num_computed == prompt_len - 1
    ours, theirs = table.ids, kv.block_ids(parent)
    assert ours[:num_shared] == theirs[:num_shared] and not set(ours[num_shared:]) & set(theirs)
    assert kv.take_moves().copies == ((BlockCopy(theirs[num_shared], ours[num_shared]),) if copies else ())
    assert kv.take_moves().copies == (), "each copy is made once"
    kv.check_invariants()
    kv.free(parent)
    kv.grow(child, prompt_len)
    kv.free(child)
    kv.check_invariants()
    assert kv.num_used_blocks == 0


def test_a_child_computes_for_itself_if_its_parent_is_gone_or_was_preempted(kv: KVManager):
    child = fork(kv, parent := make_request("a", 10, 5))
    parent.num_preemptions = 1
    kv.admit(child)
    assert child.num_computed == 8 and kv.take_moves().copies == ()
    kv.free(child)
    parent.seat, parent.num_preemptions = None, 0
    kv.free(parent)
    kv.admit(child)
    assert child.num_computed == 8 and kv.take_moves().copies == ()


# Statistics.


def test_statistics_count_every_block_and_token_once(kv: KVManager):
    first, second = make_request("a", 10, 5, family=1), make_request("b", 11, 5, family=1)
    compute(kv, first)
    compute(kv, second)
    stats = kv.stats()
    assert (stats.total_blocks, stats.used_blocks, stats.free_blocks) == (8, 4, 4)
    assert (stats.shared_blocks, stats.cached_blocks, stats.used_tokens) == (2, 0, 8 + 2 + 3)
    assert stats.prefix_cache == PrefixCacheStats(queries=21, hits=8) and stats.prefix_cache.hit_rate == 8 / 21
    assert kv.usage == 0.5
    kv.free(first)
    kv.free(second)
    stats = kv.stats()
    assert (stats.used_blocks, stats.free_blocks, stats.cached_blocks) == (0, 8, 2)
    assert (stats.shared_blocks, stats.used_tokens) == (0, 0)


def test_blocks_for_tokens_to_come_hold_no_tokens(kv: KVManager):
    compute(kv, make_request("a", 12, 5), end=5)
    assert (kv.stats().used_blocks, kv.stats().used_tokens) == (3, 5)


def test_invariants_are_checked_against_the_tables(kv: KVManager):
    compute(kv, request := make_request("a", 9, 5))
    kv.pool.share(kv.block_ids(request)[:1])
    with pytest.raises(AssertionError, match="another number of holders"):
        kv.check_invariants()
    kv.pool.release(kv.block_ids(request)[:1])
    kv.check_invariants()
    kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="in no table"):
        kv.check_invariants()


def test_another_thread_may_look_while_requests_come_and_go(kv: KVManager):
    """What the engine does in the middle of a look, a list of block ids does here, when it is looked at."""

    class Table(list):
        def __len__(self) -> int:
            kv._tables.pop("b", None)
            return super().__len__()

    for request in (make_request("a", 4, 1), make_request("b", 4, 1), make_request("c", 4, 1)):
        compute(kv, request)
    kv._tables["a"].ids = Table(kv._tables["a"].ids)
    assert kv.stats().used_blocks == 3 and kv.holders() == {"a", "c"}
