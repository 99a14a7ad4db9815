"""Tests of the host tier through block tables and scheduler: what is copied, what is not, and what comes back."""

from __future__ import annotations

import pytest
from doubles import FakeEngine, expected_answer, make_request, prompt_request

from jaxllm.memory import CacheSize, SwapCosts
from jaxllm.request import FinishReason, Request, RequestStatus
from jaxllm.scheduling.kv_manager import KVManager, Moves
from jaxllm.scheduling.plan import SwapIn, SwapOut
from jaxllm.scheduling.scheduler import StepLimits
from jaxllm.scheduling.swap_rule import SwapRule

NOTHING = Moves((), (), ())


def make_kv(host_chunks: int = 4, chunk_blocks: int = 2, enable_prefix_caching: bool = True, rule=None) -> KVManager:
    """Eight blocks of four tokens."""
    return KVManager(CacheSize(9, 4, host_chunks, chunk_blocks), enable_prefix_caching, rule)


def compute(kv: KVManager, request: Request, end: int | None = None) -> tuple[int, ...]:
    """Admits a request and lets it compute its tokens up to `end`; its blocks."""
    end = request.num_tokens if end is None else end
    assert kv.admit(request) is not None
    assert kv.grow(request, end) is not None
    request.num_computed = end
    return kv.block_ids(request)


def preempt(kv: KVManager, request: Request) -> bool:
    swapped = kv.swap_out(request)
    kv.free(request)
    request.num_computed = 0
    kv.check_invariants()
    return swapped


def test_a_swapped_request_comes_back_as_it_was():
    kv = make_kv()
    request = make_request("a", 11, 5)
    before = compute(kv, request, 10)
    assert preempt(kv, request) and kv.holders() == set() and kv.num_used_blocks == 0
    moves = kv.take_moves()
    assert moves == Moves((), (SwapOut(0, before[:2]), SwapOut(1, before[2:])), ())
    assert kv.take_moves() == NOTHING, "each copy is made once"
    kv.pool.forget_contents()  # the device has none of it any more
    assert kv.admit(request) is not None and request.num_computed == 10
    after = kv.block_ids(request)
    assert kv.take_moves() == Moves((), (), (SwapIn(0, (0, 1), after[:2]), SwapIn(1, (0,), after[2:])))
    kv.check_invariants()
    assert kv.stats().host.num_swapped == 0 and kv.stats().prefix_cache.queries == 11, "looked up once, for the prompt"


def test_what_the_device_still_has_is_not_brought_from_the_host():
    kv = make_kv()
    request = make_request("a", 11, 5)
    before = compute(kv, request, 10)
    preempt(kv, request)
    kv.take_moves()
    kv.admit(request)
    after = kv.block_ids(request)
    assert after[:2] == before[:2] and request.num_computed == 10
    assert kv.take_moves().swap_in == (SwapIn(1, (0,), after[2:]),), "only the block that is not full"
    kv.check_invariants()


def test_a_block_whose_copy_is_current_is_not_copied_again():
    kv = make_kv()
    request = make_request("a", 19, 5)
    compute(kv, request, 9)
    preempt(kv, request)
    assert sum(len(move.block_ids) for move in kv.take_moves().swap_out) == 3
    kv.pool.forget_contents()
    kv.admit(request)
    kv.take_moves()
    kv.grow(request, 16)
    request.num_computed = 16
    table = kv.block_ids(request)
    assert preempt(kv, request)
    # The chunk that held the begun block alone is of use to nobody.
    assert kv.take_moves().swap_out == (SwapOut(1, table[2:4]),), "two blocks became full since; two are as they were"
    kv.pool.forget_contents()
    kv.admit(request)
    assert request.num_computed == 16 and sum(len(move.rows) for move in kv.take_moves().swap_in) == 4
    kv.check_invariants()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_without_prefix_caching_a_request_has_its_own_copies_all_the_same(enable_prefix_caching):
    kv = make_kv(enable_prefix_caching=enable_prefix_caching)
    request, twin = make_request("a", 9, 5), make_request("a", 9, 5)
    compute(kv, request, 8)
    assert preempt(kv, request)
    kv.take_moves()
    assert kv.admit(twin) is not None
    assert twin.num_computed == (8 if enable_prefix_caching else 0)
    kv.free(twin)
    kv.take_moves()
    kv.admit(request)
    assert request.num_computed == 8
    kv.take_moves()
    assert preempt(kv, request) and kv.take_moves() == NOTHING, "both copies are current"


def test_tokens_that_the_host_does_not_know_are_named_once_it_does():
    kv = make_kv()
    request = prompt_request("a", [1, 2, 3], 9)
    compute(kv, request)
    request.num_tokens = 9  # sampled up to there, none of it was read
    kv.grow(request, 8)
    request.num_computed = 8
    assert preempt(kv, request) and kv.stats().host.cached_blocks == 0
    kv.take_moves()
    for token_id in range(6):
        request.append_tokens([token_id], [0.0])
    kv.admit(request)
    kv.take_moves()
    assert request.num_computed == 8 and kv.stats().host.cached_blocks == 2
    assert preempt(kv, request) and kv.take_moves().swap_out == ()


def test_blocks_that_others_hold_are_copied_and_left_alone():
    kv = make_kv()
    one, two = make_request("a", 10, 5, family=1), make_request("b", 11, 5, family=1)
    shared = compute(kv, one)[:2]
    compute(kv, two, 10)
    kv.take_moves()
    assert kv.block_ids(two)[:2] == shared
    assert preempt(kv, two)
    assert kv.block_ids(one)[:2] == shared and all(kv.pool.ref_count(block_id) == 1 for block_id in shared)
    assert kv.take_moves().swap_out[0] == SwapOut(0, shared), "who holds them now may be gone before"
    kv.admit(two)
    assert kv.block_ids(two)[:2] == shared and two.num_computed == 10
    kv.check_invariants()


def test_a_request_that_does_not_fit_into_host_memory_is_computed_again():
    kv = make_kv(host_chunks=1)
    large, small = make_request("a", 11, 5), make_request("b", 5, 5)
    compute(kv, large, 10)
    assert not kv.swap_out(large) and kv.stats().host.used_blocks == 0
    compute(kv, small, 4)
    assert preempt(kv, small) and kv.stats().host.used_blocks == 1
    kv.free(large)
    other = make_request("c", 6, 5)
    compute(kv, other, 5)
    assert not kv.swap_out(other), "the only chunk holds another request's block"
    kv.host.forget(small)
    assert kv.swap_out(other)
    kv.check_invariants()


def test_nothing_is_swapped_that_was_not_computed():
    kv = make_kv()
    request = make_request("a", 11, 5)
    kv.admit(request)
    assert not kv.swap_out(request)


def test_auto_compares_copies_that_are_needed_with_tokens():
    costs = SwapCosts(chunk_bytes=1, out_seconds=2.0, in_seconds=3.0, token_seconds=1.0)
    kv = make_kv(rule=SwapRule("auto", costs))
    request = make_request("a", 11, 5)
    compute(kv, request, 5)
    assert not kv.swap_out(request), "a chunk out and in for five tokens"
    request.num_computed = 6
    assert preempt(kv, request)
    kv.take_moves()
    kv.admit(request)
    kv.take_moves()
    request.num_computed = 4
    assert kv.swap_out(request), "its copy is current: there is only the way back"


@pytest.mark.parametrize(("token_seconds", "kept"), [(1.2, False), (1.3, True)])
def test_evicted_blocks_are_kept_only_where_computing_takes_much_longer(token_seconds, kept):
    costs = SwapCosts(chunk_bytes=1, out_seconds=2.0, in_seconds=3.0, token_seconds=token_seconds)
    kv = make_kv(rule=SwapRule("swap", costs))  # chunks of eight tokens
    first = make_request("a", 17, 5, family=1)
    compute(kv, first)
    kv.free(first)
    compute(kv, make_request("b", 30, 2, family=2))
    assert bool(kv.take_moves().swap_out) == kept


def test_evicted_blocks_are_kept_and_brought_back():
    kv = make_kv()
    first = make_request("a", 17, 5, family=1)
    table = compute(kv, first)
    kv.free(first)
    second = make_request("b", 30, 2, family=2)
    compute(kv, second)
    # Four of the eight blocks are cached, those at the beginning last; four blank ones and four of them are handed out.
    assert kv.take_moves().swap_out == (SwapOut(0, (table[3], table[2])), SwapOut(1, (table[1], table[0])))
    kv.free(second)
    again = make_request("c", 17, 5, family=1)
    kv.admit(again)
    ids, moves = kv.block_ids(again), kv.take_moves()
    assert again.num_computed == 16 and kv.stats().prefix_cache.host_hits == 16 == kv.stats().prefix_cache.hits
    assert moves.swap_in == (SwapIn(1, (1, 0), ids[:2]), SwapIn(0, (1, 0), ids[2:4]))
    kv.check_invariants()
    kv.free(again)
    twin = make_request("d", 17, 5, family=1)
    kv.admit(twin)
    assert kv.block_ids(twin)[:4] == ids[:4] and kv.take_moves().swap_in == (), "they are found on the device again"


def test_a_transfer_is_full_so_that_most_evictions_cost_none():
    kv = make_kv(chunk_blocks=4)
    compute(kv, first := make_request("a", 32, 5))
    kv.free(first)
    moves = []
    for index in range(8):
        request = prompt_request(str(index), [index, 1, 2], 5)
        compute(kv, request)
        moves.append(len(kv.take_moves().swap_out))
    assert moves == [1, 0, 0, 0, 1, 0, 0, 0]


def test_what_a_swap_leaves_of_its_transfer_is_filled_with_blocks_that_have_no_copy():
    kv = make_kv(chunk_blocks=4)
    compute(kv, first := make_request("a", 9, 5, family=1))
    cached = kv.block_ids(first)[:2]
    kv.free(first)
    victims = [make_request(name, 6, 5, family=family) for name, family in (("b", 2), ("c", 3))]
    tables = [compute(kv, victim, 5) for victim in victims]
    for victim, expected in zip(victims, ((*tables[0], *cached[::-1]), tables[1]), strict=True):
        assert preempt(kv, victim)
        assert [move.block_ids for move in kv.take_moves().swap_out] == [expected]


def test_evictions_take_no_room_of_swapped_requests():
    kv = make_kv(host_chunks=2, chunk_blocks=1)
    victim = make_request("a", 9, 5, family=1)
    compute(kv, victim, 8)
    assert preempt(kv, victim)
    kv.take_moves()
    for family in (2, 3, 4):
        other = make_request(f"o{family}", 32, 1, family=family)
        compute(kv, other)
        assert kv.take_moves().swap_out == ()
        kv.free(other)
    kv.admit(victim)
    assert victim.num_computed == 8 and kv.take_moves().swap_in != ()
    kv.check_invariants()


def test_a_plan_does_not_overwrite_what_it_reads():
    kv = make_kv(host_chunks=1)
    compute(kv, first := make_request("a", 9, 5, family=1))
    kv.free(first)
    compute(kv, second := make_request("b", 32, 1, family=2))
    assert kv.take_moves().swap_out == (SwapOut(0, (2, 1)),)
    kv.free(second)
    again = make_request("c", 9, 5, family=1)
    kv.admit(again)  # reads the only chunk, and evicts blocks of the second request
    moves = kv.take_moves()
    assert len(moves.swap_in) == 1 and moves.swap_out == ()
    kv.free(again)
    compute(kv, make_request("d", 32, 1, family=3))
    assert len(kv.take_moves().swap_out) == 1, "the plan is gone: the chunk is free again"


def test_a_reset_forgets_host_memory_too_but_only_while_nobody_is_swapped_out():
    kv = make_kv()
    request = make_request("a", 9, 5)
    compute(kv, request, 8)
    preempt(kv, request)
    assert not kv.reset_prefix_cache()
    kv.forget_swapped(request)
    assert kv.stats().host.cached_blocks == 2
    assert kv.reset_prefix_cache() and kv.stats().host.cached_blocks == 0
    kv.admit(request)
    assert request.num_computed == 0


# The scheduler.


def make_engine(num_blocks: int, depth: int = 1, rule: SwapRule | None = None, num_seats: int = 8) -> FakeEngine:
    """Blocks of four tokens, and host memory for forty."""
    return FakeEngine(StepLimits(num_seats, 64), CacheSize(num_blocks, 4, 20, 2), depth, swap_rule=rule)


def run_until_swapped(engine: FakeEngine) -> Request:
    while not engine.scheduler.num_swapped:
        engine.step()
        engine.check_invariants()
    (request,) = (one for one in engine.scheduler.waiting if one.status is RequestStatus.SWAPPED)
    return request


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_swapped_requests_go_before_those_that_wait(depth):
    engine = make_engine(num_blocks=13, depth=depth)
    requests = [make_request(str(index), 12, 20, family=index) for index in range(6)]
    for request in requests:
        engine.add(request)
    victim = run_until_swapped(engine)
    assert next(iter(engine.scheduler.waiting)) is victim and engine.scheduler.num_waiting > 1
    computed = victim.num_tokens - 1
    plan = engine.launch()
    while victim.status is RequestStatus.SWAPPED:
        plan = engine.launch()
        if engine.in_flight and victim.status is RequestStatus.SWAPPED:
            engine.read()
    (row,) = (row for row in plan.rows if row.request is victim)
    assert row.admitted and row.start == computed and row.num_tokens == 1, "nothing is computed twice"
    engine.run()
    for request in requests:
        assert engine.answers[request.request_id] == expected_answer(request)[0]
    assert engine.scheduler.thrash.num_lost_tokens == 0 < engine.scheduler.num_preemptions


def test_a_swapped_request_can_be_aborted():
    engine = make_engine(num_blocks=13)
    for index in range(4):
        engine.add(make_request(str(index), 12, 20, family=index))
    victim = run_until_swapped(engine)
    assert engine.abort(victim.request_id) and engine.scheduler.num_swapped == 0
    engine.check_invariants()
    assert engine.scheduler.kv.stats().host.used_blocks == 0
    engine.run()
    assert engine.finish_reasons[victim.request_id] == FinishReason.ABORT


def test_the_copies_of_a_plan_without_rows_are_left_to_the_next_one():
    """The one who needs a block is the victim, and the other waits for its last token: nothing is launched."""
    engine = make_engine(num_blocks=7, depth=2)
    one, two = make_request("a", 12, 1, family=1), make_request("b", 12, 8, family=2)
    engine.add(one)
    engine.add(two)
    assert len(engine.launch().rows) == 2
    assert not engine.launch() and two.status is RequestStatus.SWAPPED
    engine.read()
    plan = engine.launch()
    assert [len(move.block_ids) for move in plan.swap_out[:2]] == [2, 1] and len(plan.rows) == 1
    engine.run()
    assert engine.answers["b"] == expected_answer(two)[0]


def test_recompute_swaps_nobody_out():
    engine = make_engine(num_blocks=13, rule=SwapRule("recompute"))
    for index in range(4):
        engine.add(make_request(str(index), 12, 20, family=index))
    while engine.scheduler.has_unfinished:
        engine.step()
        assert engine.scheduler.num_swapped == 0
    assert engine.scheduler.num_preemptions > 0 < engine.scheduler.thrash.num_lost_tokens
    while engine.in_flight:
        engine.read()
