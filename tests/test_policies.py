"""The orders of scheduling policies, by themselves: who is next, who may wait how long, and what is refused."""

from __future__ import annotations

import math
import re

import pytest
from doubles import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import EngineConfig
from jaxllm.request import FinishReason, Request
from jaxllm.scheduling.dynamic_order import DynamicOrder
from jaxllm.scheduling.output_estimate import MEMORY, PRIOR_TOKENS, OutputEstimate
from jaxllm.scheduling.policy import FCFS, AdmissionOrder, Load, PriorityOrder, RankedOrder
from jaxllm.scheduling.policy_choice import MEMBERS, POLICIES, VICTIMS, make_order, make_victims
from jaxllm.scheduling.ranked_queue import RankedQueue
from jaxllm.scheduling.shortest_first import PROMPT_SHARE, ShortestFirst

IDLE = Load(num_running=1, num_seats=4, cache_usage=0.1)


def request_at(
    arrival: float, prompt_len: int = 10, max_tokens: int = 100, priority: int = 0, name: str = ""
) -> Request:
    request = make_request(name or f"{arrival}/{prompt_len}/{priority}", prompt_len, max_tokens)
    request.arrival_time, request.priority = arrival, priority
    return request


def names(order: AdmissionOrder) -> str:
    return "".join(request.request_id for request in order)


def end(order: AdmissionOrder, prompt_len: int, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
    """Let an order know of an answer of `num_tokens`."""
    request = make_request("ended", prompt_len, 1000)
    request.output_ids = [1] * num_tokens
    request.finish(reason)
    order.note_finished(request)


# The queue.


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.tuples(st.just("push"), st.integers(0, 5)), st.tuples(st.just("remove"), st.integers(0, 9)),
                          st.tuples(st.just("pop"), st.just(0))), max_size=300))  # fmt: skip
def test_the_queue_is_a_sorted_list(actions):
    queue, expected = RankedQueue(), []
    for number, (action, value) in enumerate(actions):
        if action == "push":
            request = make_request(str(number), 1, 1)
            queue.push(request, (value,), number)
            expected.append(((value,), number, request))
            expected.sort(key=lambda entry: entry[:2])
        elif expected and action == "pop":
            assert queue.peek() is expected[0][2]
            assert queue.pop() is expected.pop(0)[2]
        elif expected and action == "remove":
            queue.remove(expected.pop(value % len(expected))[2])
        assert len(queue) == len(expected)
        if expected:
            assert queue.peek() is expected[0][2]
    assert list(queue) == [entry[2] for entry in expected]


def test_the_queue_forgets_those_that_left_from_its_middle():
    queue = RankedQueue()
    requests = [make_request(str(number), 1, 1) for number in range(2000)]
    for number, request in enumerate(requests):
        queue.push(request, (0,), number)
    for request in requests[1:]:
        queue.remove(request)
    assert queue.peek() is requests[0] and len(queue._heap) < 200


# All orders.


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=50, deadline=None)
@given(actions=st.lists(st.tuples(st.sampled_from(["push", "push_front", "pop", "remove", "step"]), st.integers(0, 99)), max_size=60))  # fmt: skip
def test_every_order_holds_who_waits_and_shows_who_is_popped(policy, actions):
    order, waiting = make_order(policy), []
    for number, (action, value) in enumerate(actions):
        if action.startswith("push"):
            request = request_at(float(number), value + 1, 50, value % 3, name=str(number))
            getattr(order, action)(request)
            waiting.append(request)
        elif action == "step":
            order.begin_step(Load(1, 1 + value % 7, value / 99))
        elif waiting and action == "pop":
            shown = order.peek()
            assert order.pop() is shown
            waiting.remove(shown)
        elif waiting and action == "remove":
            order.remove(waiting.pop(value % len(waiting)))
        assert len(order) == len(waiting) and set(order) == set(waiting)
        if waiting:
            assert next(iter(order)) is order.peek()


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "dynamic"])
def test_who_was_admitted_before_comes_before_who_never_was(policy):
    order = make_order(policy)
    order.push(request_at(1, prompt_len=1, priority=-9, name="n"))
    order.push_front(request_at(3, prompt_len=1, name="b"))
    order.push_front(request_at(2, prompt_len=1, name="a"))
    assert names(order) == "abn"


def test_equals_of_one_prompt_keep_their_order():
    """Further answers to a prompt are pushed last one first."""
    for policy in POLICIES:
        order = make_order(policy)
        for name in "cba":
            order.push_front(request_at(1, name=name))
        assert names(order) == "abc"


# Priority.


def test_the_lowest_priority_is_next_and_equals_in_the_order_they_came():
    order = PriorityOrder()
    for name, arrival, priority in (("d", 2, 0), ("f", 3, 5), ("c", 1, 0), ("a", 4, -1)):
        order.push(request_at(arrival, priority=priority, name=name))
    order.push_front(request_at(9, priority=5, name="e"))
    order.push_front(request_at(9, priority=0, name="b"))
    assert names(order) == "abcdef"


def test_only_lower_numbers_preempt_others():
    order = PriorityOrder()
    assert order.may_preempt(request_at(2, priority=1), request_at(1, priority=2))
    assert not order.may_preempt(request_at(1, priority=2), request_at(2, priority=2))
    assert not any(make_order(policy).preempts for policy in ("fcfs", "sjf", "dynamic"))


# Shortest first.


def test_an_estimate_is_the_average_of_prompts_of_about_the_same_length():
    estimate = OutputEstimate()
    assert estimate.expect(make_request("a", 20, 1000)) == PRIOR_TOKENS
    for _ in range(2 * MEMORY):
        for prompt_len, num_tokens in ((20, 40), (300, 700)):
            ended = make_request("ended", prompt_len, 1000)
            ended.output_ids = [1] * num_tokens
            estimate.learn(ended)
    assert estimate.expect(make_request("a", 31, 1000)) == pytest.approx(40, abs=15)
    assert estimate.expect(make_request("a", 257, 1000)) == pytest.approx(700, abs=15)
    assert estimate.expect(make_request("a", 5, 1000)) == pytest.approx(370, abs=30), "a class nobody was in"
    assert estimate.expect(make_request("a", 300, 100)) == 100, "no more than max_tokens"
    assert estimate.expect(make_request("a", 20, 1000, min_tokens=200)) == 200, "no less than min_tokens"


def test_an_estimate_follows_what_changes():
    estimate = OutputEstimate()
    for num_tokens in (800, 30):
        for _ in range(4 * MEMORY):
            ended = make_request("ended", 20, 1000)
            ended.output_ids = [1] * num_tokens
            estimate.learn(ended)
    assert estimate.expect(make_request("a", 20, 1000)) < 60


def test_the_shortest_expected_job_is_next():
    order = ShortestFirst(seconds_per_token=1.0)
    for _ in range(100):
        end(order, prompt_len=20, num_tokens=400)
        end(order, prompt_len=100, num_tokens=10)
        end(order, prompt_len=100, num_tokens=900, reason=FinishReason.ABORT)  # tells nothing
    order.push(request_at(1, 20, 1000, name="c"))
    order.push(request_at(2, 100, 1000, name="b"))
    order.push(request_at(3, 20, 5, name="a"))
    assert names(order) == "abc"


@settings(max_examples=100, deadline=None)
@given(
    seconds_per_token=st.sampled_from([0.0, 0.02, 0.5]),
    jobs=st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 500), st.integers(1, 500)), min_size=2, max_size=40
    ),
)  # fmt: skip
def test_nobody_is_overtaken_for_longer_than_ageing_lets_them(seconds_per_token, jobs):
    order = ShortestFirst(seconds_per_token)
    for number, (arrival, prompt_len, max_tokens) in enumerate(sorted(jobs)):
        order.push(request_at(float(arrival), prompt_len, max_tokens, name=str(number)))
    served = [order.pop() for _ in range(len(order))]
    for place, request in enumerate(served):
        most = request.params.max_tokens + PROMPT_SHARE * request.prompt_len
        for before in served[:place]:
            assert before.arrival_time <= request.arrival_time + seconds_per_token * most
    if seconds_per_token == 0:
        assert served == sorted(served, key=lambda request: (request.arrival_time, int(request.request_id)))


# Dynamic.


def test_waiting_makes_up_for_priority():
    order = DynamicOrder(priority_seconds=10)
    order.push(request_at(0, priority=1, name="b"))
    order.push(request_at(9, priority=0, name="a"))
    order.push(request_at(11, priority=0, name="c"))
    assert names(order) == "abc"


def test_the_scarcer_seats_and_memory_are_the_more_size_counts():
    order = DynamicOrder(seconds_per_token=0.01)
    order.push(request_at(0, 1001, name="l"))
    order.push(request_at(15, 1, name="s"))
    order.push(request_at(25, 1, name="t"))
    seen = []
    for load in (
        IDLE,
        Load(num_running=2, num_seats=2, cache_usage=0.5),
        Load(num_running=2, num_seats=4, cache_usage=0.95),
        Load(num_running=2, num_seats=2, cache_usage=0.95),
    ):
        order.begin_step(load)
        seen.append((order.pressure, names(order)))
    assert seen == [(0, "lst"), (1, "lst"), (1, "lst"), (2, "slt")]


@settings(max_examples=50, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 900), st.integers(-2, 3)), min_size=2, max_size=30),
    loads=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.1, 0.95])), min_size=1, max_size=30),
)
def test_under_dynamic_nobody_is_overtaken_by_who_came_much_later(jobs, loads):
    order = DynamicOrder()
    for number, (arrival, prompt_len, priority) in enumerate(sorted(jobs)):
        order.push(request_at(float(arrival), prompt_len, priority=priority, name=str(number)))
    served = []
    while len(order):
        num_seats, usage = loads[len(served) % len(loads)]
        order.begin_step(Load(1, num_seats, usage))
        served.append(order.pop())
    for place, request in enumerate(served):
        for before in served[:place]:
            head_start = 10 * (request.priority - before.priority) + 2 * 0.01 * request.num_tokens
            assert before.arrival_time <= request.arrival_time + max(head_start, 0)


# Which policy.


class LongestFirst(RankedOrder):
    """A policy of a user's own."""

    def rank(self, request, is_back):
        return (not is_back, -request.prompt_len)


class NoPeek(RankedOrder):
    """Forgets to say what a rank is."""


class Duck:
    """Inherits from nothing and lacks most."""

    def push(self, request):
        raise AssertionError


def test_policies_go_by_name_instance_class_or_where_to_find_the_class():
    kinds = {name: type(make_order(name)) for name in POLICIES}
    assert kinds == {"fcfs": FCFS, "priority": PriorityOrder, "sjf": ShortestFirst, "dynamic": DynamicOrder}
    order = make_order("test_policies:LongestFirst")
    order.push(request_at(1, 5, name="b"))
    order.push(request_at(2, 9, name="a"))
    assert names(order) == "ab" and not order.uses_priority
    assert type(make_order(LongestFirst)) is LongestFirst
    own = ShortestFirst(seconds_per_token=7)
    assert EngineConfig("m", scheduling_policy=own).scheduling_policy is own
    made = make_order(own)
    assert made is not own and isinstance(made, ShortestFirst) and made.seconds_per_token == 7


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("no_such_module:Order", r"scheduling_policy='no_such_module:Order' cannot be imported"),
        ("test_policies:Missing", r"scheduling_policy='test_policies:Missing' cannot be imported"),
        ("test_policies:NoPeek", r"'test_policies:NoPeek' cannot be made: .*abstract method '?rank"),
        ("test_policies:Duck", r"'test_policies:Duck' lacks uses_priority, preempts, push_front, peek.*inherit from"),
        (Duck(), r"scheduling_policy=<.*Duck.*> lacks .*may_preempt: inherit from"),
        (5, r"scheduling_policy=5 lacks"),
    ],
)
def test_what_is_no_policy_is_named(policy, message):
    with pytest.raises(ValueError, match=message):
        make_order(EngineConfig("m", scheduling_policy=policy).scheduling_policy)


def test_all_that_the_protocol_names_is_looked_for():
    named = {name for name in vars(AdmissionOrder) if not name.startswith("_") or name in ("__len__", "__iter__")}
    assert named == set(MEMBERS)


def test_a_policy_that_holds_requests_is_refused():
    order = FCFS()
    order.push(request_at(1))
    with pytest.raises(ValueError, match="holds requests already"):
        make_order(order)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' is unknown: use fcfs, priority, sjf, dynamic, an"),
        ({"scheduling_policy": None}, "scheduling_policy=None is unknown"),
        ({"preemption_victim": "oldest"}, "preemption_victim='oldest' is unknown: use one of last_joined, least_pro"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1 has to be a whole number"),
        ({"long_prefill_token_threshold": True}, "long_prefill_token_threshold=True has to be"),
    ],
)
def test_fields_that_are_not_valid_are_named(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EngineConfig("m", **fields)


@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_ageing_that_is_not_valid_is_named(value):
    with pytest.raises(ValueError, match=r"seconds_per_token=.* is not valid"):
        ShortestFirst(value)
    with pytest.raises(ValueError, match=r"priority_seconds=.* is not valid"):
        DynamicOrder(priority_seconds=value)


def test_the_default_victim_goes_with_the_policy():
    defaults = {policy: type(make_victims(None, make_order(policy))) for policy in POLICIES}
    last, lowest = VICTIMS["last_joined"], VICTIMS["lowest_priority"]
    assert defaults == {"fcfs": last, "priority": lowest, "sjf": last, "dynamic": lowest}
    assert type(make_victims("least_progress", make_order("priority"))) is VICTIMS["least_progress"]
