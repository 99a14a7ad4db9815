"""Tests of the scheduler's rules, one by one, over a fake device that checks every step."""

from __future__ import annotations

import pytest
from doubles import FakeEngine, expected_answer, make_request, sample

from jaxllm.memory import CacheSize
from jaxllm.request import FinishReason, Request, RequestStatus
from jaxllm.scheduling.plan import StepOutput, StepPlan
from jaxllm.scheduling.policy import FCFS
from jaxllm.scheduling.scheduler import Scheduler, StepLimits

ROOMY = CacheSize(num_blocks=201, block_size=4)


def rows_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request.request_id, row.start, row.end) for row in plan.rows]


def output_of(plan: StepPlan, token_id: int = 1) -> StepOutput:
    return StepOutput([[token_id]] * len(plan.rows), [[-1.0]] * len(plan.rows))


def add_all(engine: FakeEngine | Scheduler, *requests: Request) -> None:
    for request in requests:
        engine.add(request)


# Admission, chunks, budget and seats.


def test_a_plan_is_empty_when_there_is_nothing_to_do():
    scheduler = Scheduler(StepLimits(4, 16), ROOMY)
    assert not scheduler.schedule() and not scheduler.has_unfinished


def test_prompts_are_computed_in_chunks_under_the_budget_and_running_requests_go_first():
    engine = FakeEngine(StepLimits(4, 8), ROOMY)
    add_all(engine, make_request("a", 3, 9), make_request("b", 12, 9), make_request("c", 2, 9))
    assert rows_of(engine.launch()) == [("a", 0, 3), ("b", 0, 5)]
    assert rows_of(engine.launch()) == [("a", 3, 4), ("b", 5, 12)]
    assert rows_of(engine.launch()) == [("a", 4, 5), ("b", 12, 13), ("c", 0, 2)]


def test_only_a_row_that_reaches_the_last_token_samples():
    scheduler = Scheduler(StepLimits(4, 8), ROOMY)
    scheduler.add(make_request("a", 12, 9))
    assert [row.samples for _ in range(3) for row in scheduler.schedule().rows] == [False, True, True]


def test_no_more_requests_run_than_the_budget_has_tokens():
    engine = FakeEngine(StepLimits(4, 2), ROOMY)
    add_all(engine, *(make_request(name, 1, 3) for name in "abc"))
    assert rows_of(engine.launch()) == [("a", 0, 1), ("b", 0, 1)]
    assert rows_of(engine.launch()) == [("a", 1, 2), ("b", 1, 2)]
    engine.run()
    assert all(len(answer) == 3 for answer in engine.answers.values())


def test_when_the_budget_is_spent_the_oldest_were_served():
    engine = FakeEngine(StepLimits(4, 3), ROOMY)
    add_all(engine, *(make_request(name, 1, 3) for name in "abc"))
    engine.launch()
    engine.scheduler._limits = engine.limits = StepLimits(
        4, 2
    )  # admission alone never brings more requests than tokens
    assert rows_of(engine.launch()) == [("a", 1, 2), ("b", 1, 2)]


def test_the_lowest_free_seat_is_taken_and_the_row_says_so():
    engine = FakeEngine(StepLimits(3, 32), ROOMY)
    add_all(engine, *(make_request(name, 3, 9) for name in "abcd"))
    assert [(row.seat, row.admitted) for row in engine.launch().rows] == [(0, True), (1, True), (2, True)]
    assert [(row.seat, row.admitted) for row in engine.launch().rows] == [(0, False), (1, False), (2, False)]
    engine.abort("c")
    engine.abort("a")
    engine.add(make_request("e", 3, 9))
    plan = engine.launch()
    assert [(row.request.request_id, row.seat, row.admitted) for row in plan.rows] == [
        ("b", 1, False),
        ("d", 0, True),
        ("e", 2, True),
    ]


def test_a_request_is_admitted_only_if_blocks_for_all_of_its_tokens_are_free():
    engine = FakeEngine(StepLimits(4, 8), CacheSize(num_blocks=7, block_size=4))
    add_all(engine, make_request("a", 12, 2), make_request("b", 14, 2), make_request("c", 1, 2))
    assert rows_of(engine.launch()) == [("a", 0, 8)]
    plan = engine.launch()
    assert rows_of(plan) == [("a", 8, 12)], "b needs 4 blocks, 3 are free, and c does not overtake it"
    assert engine.scheduler.num_waiting == 2
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_a_plan_names_the_blocks_the_device_was_not_told_of():
    engine = FakeEngine(StepLimits(4, 6), ROOMY)
    engine.add(make_request("a", 10, 5))
    told = [(row.first_new_block, row.new_block_ids) for _ in range(5) for row in engine.launch().rows]
    table = engine.scheduler.kv.block_ids(engine.scheduler.requests["a"])
    assert told == [(0, table[:3]), (0, ()), (0, ()), (0, ()), (3, table[3:])]


# Finishing.


def test_an_answer_ends_at_its_length_limit():
    engine = FakeEngine(StepLimits(2, 32), ROOMY)
    request = make_request("a", 5, 3)
    engine.add(request)
    engine.run()
    assert engine.answers["a"] == request.output_ids == expected_answer(request)[0]
    assert len(request.output_ids) == 3 and request.finish_reason is FinishReason.LENGTH
    assert request.status is RequestStatus.FINISHED and request.stop_reason is None
    assert engine.scheduler.kv.num_used_blocks == 0 and not engine.scheduler.requests


@pytest.mark.parametrize(
    ("eos", "params", "reason", "stop_reason", "length"),
    [
        ([9], {}, FinishReason.STOP, None, 1),
        ([], {"stop_token_ids": [9]}, FinishReason.STOP, 9, 1),
        ([9], {"stop_token_ids": [9]}, FinishReason.STOP, None, 1),
        ([9], {"stop_token_ids": [9], "ignore_eos": True}, FinishReason.STOP, 9, 1),
        ([9], {"ignore_eos": True}, FinishReason.LENGTH, None, 4),
        ([9], {"min_tokens": 3}, FinishReason.STOP, None, 3),
        ([8], {}, FinishReason.LENGTH, None, 4),
    ],
)
def test_why_an_answer_of_nines_ends(eos, params, reason, stop_reason, length):
    scheduler = Scheduler(StepLimits(2, 32), ROOMY)
    request = make_request("a", 5, 4, eos=eos, **params)
    scheduler.add(request)
    outputs = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        outputs += scheduler.update(plan, output_of(plan, 9))
    assert request.output_ids == [9] * length and request.output_logprobs == [-1.0] * length
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert [output.finish_reason for output in outputs] == [None] * (length - 1) + [reason]
    assert outputs[-1].stop_reason == stop_reason


def test_a_stop_token_at_the_length_limit_is_a_stop():
    scheduler = Scheduler(StepLimits(2, 32), ROOMY)
    request = make_request("a", 5, 1, eos=[9])
    scheduler.add(request)
    plan = scheduler.schedule()
    assert scheduler.update(plan, output_of(plan, 9))[0].finish_reason == "stop"


@pytest.mark.parametrize("launches", [0, 1, 2])
def test_an_aborted_request_leaves_nothing_behind(launches: int):
    engine = FakeEngine(StepLimits(1, 4), ROOMY, depth=3)
    add_all(engine, make_request("a", 6, 9), make_request("b", 6, 2))
    for _ in range(launches):
        engine.launch()
    request = engine.scheduler.requests["a"]
    assert engine.abort("a")
    assert request.finish_reason is FinishReason.ABORT and request.num_pending == 0
    engine.check_invariants()
    assert not engine.abort("a"), "a second time nothing happens"
    engine.run()
    assert engine.answers["a"] == [] and len(engine.answers["b"]) == 2


def test_a_stop_string_is_an_abort_with_another_reason():
    scheduler = Scheduler(StepLimits(2, 32), ROOMY)
    request = make_request("a", 5, 9)
    scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.update(plan, output_of(plan))
    scheduler.abort("a", FinishReason.STOP, stop_reason="\n\n")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "\n\n")


def test_an_id_can_be_used_again_while_rows_of_its_first_owner_are_in_flight():
    engine = FakeEngine(StepLimits(2, 32), ROOMY, depth=3)
    engine.add(make_request("a", 6, 9))
    engine.launch()
    engine.launch()
    engine.abort("a")
    second = make_request("a", 8, 4)
    engine.add(second)
    engine.run()
    assert engine.answers["a"] == second.output_ids == expected_answer(second)[0]


# Run-ahead.


def test_a_step_is_planned_before_the_last_one_was_read():
    engine = FakeEngine(StepLimits(2, 32), ROOMY, depth=3)
    request = make_request("a", 5, 9)
    engine.add(request)
    plans = [engine.launch() for _ in range(3)]
    assert [rows_of(plan) for plan in plans] == [[("a", 0, 5)], [("a", 5, 6)], [("a", 6, 7)]]
    assert [plan.rows[0].num_known for plan in plans] == [5, 5, 5]
    assert request.num_pending == 3 and request.num_known == 5 and request.num_tokens == 8
    engine.read()
    assert request.num_pending == 2 and request.num_known == 6


def test_nothing_is_computed_past_a_length_limit_that_pending_tokens_reach():
    engine = FakeEngine(StepLimits(2, 32), ROOMY, depth=9)
    engine.add(make_request("a", 5, 2))
    assert engine.launch() and engine.launch() and not engine.launch()
    engine.run()
    assert len(engine.answers["a"]) == 2


def test_what_was_computed_past_a_stop_is_dropped():
    request = make_request("a", 5, 9)
    first = sample(request, request.prompt_ids)
    engine = FakeEngine(StepLimits(2, 32), ROOMY, depth=3)
    request = make_request("a", 5, 9, eos=[first])
    engine.add(request)
    engine.run()
    assert engine.answers["a"] == request.output_ids == [first]
    assert request.num_pending == 0 and engine.scheduler.kv.num_used_blocks == 0


def test_plans_are_updated_in_order():
    scheduler = Scheduler(StepLimits(2, 32), ROOMY)
    scheduler.add(make_request("a", 5, 9))
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(AssertionError, match="in the order they were scheduled"):
        scheduler.update(second, output_of(second))


# Preemption.


def crowded(depth: int = 1) -> FakeEngine:
    """Three requests of 2 blocks each in 6 blocks: at the next token each needs a third one."""
    engine = FakeEngine(StepLimits(4, 64), CacheSize(num_blocks=7, block_size=4), depth)
    add_all(engine, make_request("a", 8, 8), make_request("b", 8, 8), make_request("c", 8, 8))
    engine.launch()
    return engine


def test_the_last_joined_request_is_preempted_for_an_older_one():
    engine = crowded()
    engine.read()
    assert rows_of(engine.launch()) == [("a", 8, 9), ("b", 8, 9)]
    engine.check_invariants()
    victim = engine.scheduler.requests["c"]
    assert victim.status is RequestStatus.WAITING and victim.seat is None and victim.num_computed == 0
    assert victim.num_preemptions == engine.scheduler.num_preemptions == 1
    assert victim.num_tokens == victim.num_known == 9


def test_a_request_can_be_its_own_victim():
    engine = FakeEngine(StepLimits(4, 64), CacheSize(num_blocks=5, block_size=4))
    add_all(engine, make_request("a", 5, 8), make_request("b", 8, 8))
    engine.launch()
    engine.read()
    assert rows_of(engine.launch()) == [("a", 5, 6)], "b could grow only at the cost of a"
    assert engine.scheduler.requests["b"].num_preemptions == 1


def test_preempted_requests_wait_before_all_others_in_the_order_they_came():
    engine = FakeEngine(StepLimits(4, 64), CacheSize(num_blocks=7, block_size=4))
    add_all(engine, *(make_request(name, 8, 16) for name in "abc"))
    engine.launch()
    engine.add(make_request("d", 1, 1))
    seen = set()
    while engine.scheduler.has_unfinished:
        if engine.in_flight:
            engine.read()
        engine.launch()
        seen.add("".join(request.request_id for request in engine.scheduler.waiting))
    assert "bcd" in seen and "db" not in seen
    assert {name: len(answer) for name, answer in engine.answers.items()} == {"a": 16, "b": 16, "c": 16, "d": 1}


def test_a_preempted_request_still_receives_its_pending_token_and_waits_for_it():
    engine = crowded(depth=2)
    assert rows_of(engine.launch()) == [("a", 8, 9), ("b", 8, 9)]
    victim = engine.scheduler.requests["c"]
    assert victim.num_pending == 1 and victim.num_known == 8
    engine.abort("a")
    engine.abort("b")
    assert not engine.launch(), "its token is not read yet"
    outputs = engine.read()
    assert [output.request_id for output in outputs] == ["c"]
    assert victim.num_pending == 0 and victim.num_known == 9
    (row,) = engine.launch().rows
    assert row.request is victim and row.admitted and (row.start, row.end) == (8, 9), "its prompt is still cached"
    assert row.first_new_block == 0 and row.new_block_ids == engine.scheduler.kv.block_ids(victim)
    engine.run()
    assert engine.answers["c"] == expected_answer(victim)[0]


def test_admission_stops_while_the_next_one_has_pending_tokens():
    engine = crowded(depth=2)
    engine.launch()
    engine.add(make_request("d", 1, 1))
    engine.abort("a")
    assert rows_of(engine.launch()) == [("b", 9, 10)], "d does not overtake c"


@pytest.mark.parametrize(("max_tokens", "eos", "reason"), [(1, [], FinishReason.LENGTH), (8, [0], FinishReason.STOP)])
def test_a_preempted_request_can_finish_with_its_pending_token(max_tokens, eos, reason):
    scheduler = Scheduler(StepLimits(4, 64), CacheSize(num_blocks=5, block_size=4))
    add_all(scheduler, make_request("a", 8, 8), make_request("b", 6, max_tokens, eos=eos))
    first = scheduler.schedule()
    scheduler.schedule()
    victim = scheduler.requests["b"]
    assert victim.status is RequestStatus.WAITING and victim.num_pending == 1
    outputs = scheduler.update(first, output_of(first, 0))
    assert outputs[1].finish_reason is victim.finish_reason is reason
    assert scheduler.num_waiting == 0 and list(scheduler.requests) == ["a"]


def test_a_preempted_request_can_be_aborted():
    engine = crowded(depth=2)
    engine.launch()
    engine.abort("c")
    engine.check_invariants()
    engine.run()
    assert engine.answers["c"] == [] and len(engine.answers["a"]) == 8


# What add refuses.


def test_add_refuses_what_the_engine_has_to_refuse_before():
    scheduler = Scheduler(StepLimits(4, 64), CacheSize(num_blocks=5, block_size=4))
    scheduler.add(make_request("a", 8, 8))
    with pytest.raises(AssertionError, match="here already"):
        scheduler.add(make_request("a", 8, 8))
    with pytest.raises(AssertionError, match="no room for an answer"):
        scheduler.add(Request("b", (), make_request("c", 1, 1).params, frozenset(), max_len=4, seed=0))
    scheduler.add(make_request("d", 8, 9))
    with pytest.raises(AssertionError, match="outgrow the whole cache"):
        scheduler.add(make_request("e", 8, 10))


# The admission order.


def test_fcfs_keeps_the_order_of_arrival():
    order, requests = FCFS(), {name: make_request(name, 1, 1) for name in "abcdef"}
    for name in "cdef":
        order.push(requests[name])
    order.push_front(requests["b"])
    order.push_front(requests["a"])
    order.remove(requests["d"])
    assert [request.request_id for request in order] == ["a", "b", "c", "e", "f"]
    assert order.peek() is order.pop() is requests["a"]
    assert len(order) == 4
    with pytest.raises(AssertionError, match="waits already"):
        order.push(requests["b"])


class ShortestFirst(FCFS):
    """Another policy: the shortest prompt is next."""

    def peek(self) -> Request:
        return min(self, key=lambda request: request.prompt_len)

    def pop(self) -> Request:
        request = self.peek()
        self.remove(request)
        return request


def test_a_policy_decides_who_is_next_but_nobody_comes_back_in_the_step_that_preempted():
    scheduler = Scheduler(StepLimits(4, 64), CacheSize(num_blocks=7, block_size=4), waiting=ShortestFirst())
    add_all(scheduler, make_request("a", 8, 8), make_request("b", 4, 8), make_request("c", 10, 8))
    assert rows_of(scheduler.schedule()) == [("b", 0, 4), ("a", 0, 8), ("c", 0, 10)]
    scheduler.add(make_request("d", 1, 1))
    assert rows_of(scheduler.schedule()) == [("b", 4, 5), ("a", 8, 9)], "c had to go and leaves room, but not yet for d"
    assert rows_of(scheduler.schedule())[2:] == [("d", 0, 1)]
