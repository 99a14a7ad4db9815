"""Who has to go when blocks or seats run short, who may push out others, and how much of a long prompt a step takes."""

from __future__ import annotations

import pytest
from doubles import FakeEngine, expected_answer, make_request

from jaxllm.memory import CacheSize
from jaxllm.request import Request
from jaxllm.scheduling.displacement import PATIENCE
from jaxllm.scheduling.plan import StepPlan
from jaxllm.scheduling.policy import FCFS, PriorityOrder
from jaxllm.scheduling.policy_choice import POLICIES, VICTIMS, make_order
from jaxllm.scheduling.scheduler import StepLimits
from jaxllm.scheduling.victims import LastJoined, LeastProgress, LowestPriority

ROOMY = CacheSize(num_blocks=201, block_size=4)


def request_of(name: str, prompt_len: int, max_tokens: int, priority: int = 0, **params) -> Request:
    request = make_request(name, prompt_len, max_tokens, **params)
    request.priority = priority
    return request


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


def rows_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request.request_id, row.start, row.end) for row in plan.rows]


def engine_of(num_seats: int, size: CacheSize, priority: bool = True, depth: int = 1, budget: int = 64) -> FakeEngine:
    order, victims = (PriorityOrder(), LowestPriority()) if priority else (FCFS(), LastJoined())
    return FakeEngine(StepLimits(num_seats, budget), size, depth, waiting=order, victims=victims)


# Victims.


def test_each_choice_names_its_first_victim_last():
    running = [request_of("a", 9, 9, 5), request_of("b", 5, 9, -1), request_of("c", 9, 9, 5), request_of("d", 7, 9, 0)]
    for request in running:
        request.num_computed = request.prompt_len
    assert ids(LastJoined().order(running)) == ["a", "b", "c", "d"]
    assert ids(LeastProgress().order(running)) == ["a", "c", "d", "b"]
    assert ids(LowestPriority().order(running)) == ["b", "d", "a", "c"]


@pytest.mark.parametrize(("victims", "gone"), [("last_joined", "c"), ("least_progress", "b"), ("lowest_priority", "a")])
def test_the_chosen_one_has_to_go(victims, gone):
    size = CacheSize(num_blocks=7, block_size=4)
    engine = FakeEngine(StepLimits(4, 64), size, waiting=FCFS(), victims=VICTIMS[victims]())
    for name, prompt_len, priority in (("a", 8, 9), ("b", 4, 0), ("c", 8, 0)):
        engine.add(request_of(name, prompt_len, 8, priority))
    engine.launch()
    engine.read()
    while not engine.scheduler.num_preemptions:
        engine.launch()
        engine.check_invariants()
        engine.read()
    assert ids(engine.scheduler.waiting) == [gone]
    engine.run()
    for name, answer in engine.answers.items():
        assert len(answer) == 8, name


@pytest.mark.parametrize("victims", VICTIMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_the_same_under_any_policy_and_victim_choice(policy, victims):
    size = CacheSize(num_blocks=20, block_size=4)
    order = make_order(policy)
    engine = FakeEngine(StepLimits(6, 16, long_prompt_tokens=12), size, 3, waiting=order, victims=VICTIMS[victims]())
    stops = range(0, 251, 5)
    requests = [
        request_of(str(i), 1 + 7 * i % 40, 3 + 5 * i % 30, i % 3, eos=stops if i % 3 == 0 else ()) for i in range(24)
    ]
    for number, request in enumerate(requests):
        engine.add(request)
        if number % 3 == 0:
            engine.step()
            engine.check_invariants()
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for request in requests:
        assert (engine.answers[request.request_id], engine.finish_reasons[request.request_id]) == expected_answer(
            request
        )


# Urgent requests.


def count_steps_until(engine: FakeEngine, name: str) -> int:
    """Steps until a request runs."""
    for count in range(100):
        if name in engine.scheduler.running:
            return count
        engine.step()
        engine.check_invariants()
    raise AssertionError(f"{name} never ran")


def test_an_urgent_request_takes_a_seat_when_it_waited_for_long():
    engine = engine_of(2, ROOMY)
    for name in "ab":
        engine.add(request_of(name, 4, 60, priority=1))
    engine.step()
    engine.add(request_of("c", 4, 5, priority=1))
    engine.add(request_of("u", 4, 5, priority=0))
    assert count_steps_until(engine, "u") == PATIENCE + 1
    assert ids(engine.scheduler.waiting) == ["b", "c"], "who joined last had to go, and is back before others"
    engine.run()
    assert engine.scheduler.num_preemptions == 1
    assert {name: len(answer) for name, answer in engine.answers.items()} == {"a": 60, "b": 60, "c": 5, "u": 5}


def test_nobody_is_pushed_out_while_seats_become_free_soon():
    engine = engine_of(2, ROOMY)
    for index in range(30):
        engine.add(request_of(f"l{index}", 4, 5, priority=1))
    for index in range(6):
        engine.add(request_of(f"u{index}", 4, 5, priority=0))
        engine.step()
    engine.run()
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("priority", [0, 1])
def test_only_who_is_more_urgent_pushes_others_out(priority):
    engine = engine_of(2, ROOMY, priority=True)
    for name in "ab":
        engine.add(request_of(name, 4, 60, priority=0))
    engine.step()
    engine.add(request_of("c", 4, 5, priority=priority))
    engine.run()
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_an_urgent_request_takes_as_many_blocks_as_it_needs(depth):
    engine = engine_of(8, CacheSize(num_blocks=41, block_size=4), depth=depth)
    for family, name in enumerate("abcd"):
        engine.add(request_of(name, 24, 60, priority=1, family=family))
    while engine.scheduler.num_waiting:
        engine.step()
    engine.add(request_of("u", 80, 5, priority=0))
    assert count_steps_until(engine, "u") <= PATIENCE + 1
    assert 1 <= engine.scheduler.num_preemptions <= 3
    engine.run()
    assert len(engine.answers["u"]) == 5 and len(engine.answers["d"]) == 60


def test_nobody_is_pushed_out_in_vain():
    """All the blocks that the urgent request lacks are held by one that is as urgent."""
    engine = engine_of(8, CacheSize(num_blocks=31, block_size=4))
    engine.add(request_of("a", 40, 40, priority=0))
    engine.add(request_of("b", 4, 40, priority=1))
    engine.step()
    engine.add(request_of("u", 100, 5, priority=0))
    for _ in range(2 * PATIENCE):
        engine.step()
    assert engine.scheduler.num_preemptions == 0 and "b" in engine.scheduler.running


def test_a_long_prompt_that_takes_all_tokens_has_to_go_and_not_who_decodes():
    engine = engine_of(2, CacheSize(num_blocks=2001, block_size=4), budget=8)
    engine.add(request_of("d", 4, 900, priority=5))
    engine.step()
    engine.add(request_of("p", 1000, 5, priority=0))
    engine.step()
    engine.add(request_of("u", 4, 5, priority=-1))
    for _ in range(2 * PATIENCE):
        engine.step()
        assert "d" in engine.scheduler.running
    assert len(engine.answers["u"]) == 5


def test_who_was_pushed_out_samples_before_it_has_to_go_again():
    """The invariant of `FakeEngine` under a stream of urgent requests."""
    engine = engine_of(2, CacheSize(num_blocks=25, block_size=4), depth=2)
    for name in "abc":
        engine.add(request_of(name, 10, 70, priority=2))
    for index in range(200):
        engine.step()
        engine.check_invariants()
        if index % 7 == 0:
            engine.add(request_of(f"u{index}", 5, 20, priority=index % 2))
    assert engine.scheduler.num_preemptions > 1
    engine.run()
    assert all(len(engine.answers[name]) == 70 for name in "abc")


# Long prompts.


def test_answers_wait_for_one_chunk_of_long_prompts_at_the_most():
    engine = FakeEngine(StepLimits(8, 64, long_prompt_tokens=8), ROOMY)
    for name in "ab":
        engine.add(make_request(name, 3, 40))
    engine.launch()
    engine.read()
    for name, prompt_len in (("l", 50), ("m", 30), ("s", 8)):
        engine.add(make_request(name, prompt_len, 4))
    assert rows_of(engine.launch())[2:] == [("l", 0, 8), ("m", 0, 1), ("s", 0, 8)], "short ones are not held up"
    while engine.scheduler.has_unfinished:
        while engine.in_flight:
            engine.read()
        plan = engine.launch()
        long_rows = [row for row in plan.rows if row.num_tokens > 1]
        assert sum(row.num_tokens for row in long_rows) <= 8
        assert {"a", "b"} & set(engine.scheduler.running) <= {row.request.request_id for row in plan.rows}
        engine.check_invariants()
    for name, prompt_len in (("l", 50), ("m", 30), ("s", 8)):
        assert engine.answers[name] == expected_answer(make_request(name, prompt_len, 4))[0]


def test_the_first_of_two_long_prompts_is_done_first():
    engine = FakeEngine(StepLimits(8, 64, long_prompt_tokens=8), ROOMY)
    for family, name in enumerate("lm"):
        engine.add(make_request(name, 28, 4, family=family))
    chunks = []
    for _ in range(5):
        chunks.append(rows_of(engine.launch()))
        engine.read()
    assert chunks[:4] == [[("l", 0, 8), ("m", 0, 1)], [("l", 8, 16)], [("l", 16, 24)], [("l", 24, 28), ("m", 1, 5)]]


def test_without_a_threshold_a_prompt_takes_the_budget():
    engine = FakeEngine(StepLimits(8, 64), ROOMY)
    engine.add(make_request("l", 100, 4))
    assert rows_of(engine.launch()) == [("l", 0, 64)]
