"""Who is admitted, who is preempted, and what a user hears of it when the cache is too small."""

from __future__ import annotations

import logging

import pytest
from doubles import FakeEngine, expected_answer, make_request

from jaxllm.memory import CacheSize
from jaxllm.scheduling.scheduler import StepLimits
from jaxllm.scheduling.thrash import PREEMPTIONS_PER_WARNING, ThrashCounter

LIMITS = StepLimits(8, 64)


def names(rows) -> list[str]:
    return [row.request.request_id for row in rows]


# Room.


@pytest.mark.parametrize(("num_tokens", "admitted"), [(380, True), (384, True), (385, False)])
def test_others_are_admitted_only_if_one_block_in_a_hundred_stays_free(num_tokens: int, admitted: bool):
    """200 blocks of 4: 102 are taken and 2 are to stay free."""
    engine = FakeEngine(StepLimits(8, 1000), CacheSize(201, 4))
    engine.add(make_request("a", 406, 50))
    engine.launch()
    engine.add(make_request("b", num_tokens, 3))
    assert names(engine.launch().rows) == (["a", "b"] if admitted else ["a"])


def test_a_request_that_runs_alone_may_take_all_there_is():
    engine = FakeEngine(StepLimits(8, 1000), CacheSize(201, 4))
    engine.add(make_request("a", 799, 2))
    assert names(engine.launch().rows) == ["a"]


def test_an_admitted_prompt_keeps_its_blocks_while_it_is_computed_in_chunks():
    """Without that, b would take what a still needs, and be preempted for it."""
    engine = FakeEngine(StepLimits(8, 8), CacheSize(num_blocks=9, block_size=4))
    engine.add(make_request("a", 28, 1))
    engine.add(make_request("b", 7, 1))
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert len(engine.answers["a"]) == len(engine.answers["b"]) == 1


def test_admissions_are_spread_over_steps_if_a_step_cannot_name_all_their_blocks():
    engine = FakeEngine(StepLimits(8, 64, admitted_blocks=7), CacheSize(101, 4))
    for name, length in zip("abcd", (12, 13, 28, 2), strict=True):
        engine.add(make_request(name, length, 9))
    assert [names(engine.launch().rows) for _ in range(4)] == [["a", "b"], ["a", "b", "c"], [*"abcd"], [*"abcd"]]


def test_a_cached_prefix_costs_nothing_of_the_budget():
    engine = FakeEngine(StepLimits(8, 30), CacheSize(101, 4))
    engine.add(make_request("a", 28, 1, family=1))
    engine.run()
    for name in "bcd":
        engine.add(make_request(name, 29, 3, family=1))
    assert [(row.start, row.end) for row in engine.launch().rows] == [(28, 29)] * 3


# Preemption.


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_request_that_came_back_is_not_preempted_before_it_sampled_again(enable_prefix_caching: bool):
    """Of 6 blocks, a has 2 and wants a third; b is back with 4 and computes in chunks. So a pauses until b has sampled."""
    engine = FakeEngine(StepLimits(8, 8), CacheSize(7, 4), enable_prefix_caching=enable_prefix_caching)
    a, b = make_request("a", 7, 9), make_request("b", 16, 6)
    engine.add(a)
    engine.add(b)
    engine.launch()
    engine.scheduler._preempt(b)
    rows = []
    for _ in range(4):
        engine.read()
        rows.append([(row.request.request_id, row.start, row.end) for row in engine.launch().rows])
        engine.check_invariants()
    assert rows == [[("a", 7, 8), ("b", 0, 7)], [("b", 7, 15)], [("b", 15, 16)], [("a", 8, 9)]]
    assert b.num_preemptions == 2
    engine.run()
    for request in (a, b):
        assert engine.answers[request.request_id] == expected_answer(request)[0]


# What the user hears.


def test_a_warning_comes_once_in_so_many_preemptions_and_names_what_helps(caplog):
    counter = ThrashCounter()
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * PREEMPTIONS_PER_WARNING + 1):
            counter.note(num_computed=3)
    assert len(caplog.records) == 2
    assert counter.num_preemptions == 2 * PREEMPTIONS_PER_WARNING + 1
    assert counter.num_lost_tokens == 3 * counter.num_preemptions
    for remedy in ("gpu_memory_utilization", "num_gpu_blocks_override", "max_num_seqs", "100 requests"):
        assert remedy in caplog.text


def test_preemptions_are_counted_with_the_tokens_they_cost():
    engine = FakeEngine(LIMITS, CacheSize(num_blocks=7, block_size=4))
    for name in "abc":
        engine.add(make_request(name, 8, 8))
    engine.launch()
    engine.launch()
    assert (engine.scheduler.thrash.num_preemptions, engine.scheduler.thrash.num_lost_tokens) == (1, 8)
