"""What sharing K/V saves: prompts that begin alike, forks, conversations; and how little the blocks waste."""

from __future__ import annotations

import random
import statistics

import pytest
from chat_workload import Simulation, make_conversations
from doubles import VOCAB_SIZE, FakeEngine, expected_answer, make_request, prompt_request

from jaxllm.memory import CacheSize
from jaxllm.request import Request
from jaxllm.scheduling.plan import StepOutput, StepPlan
from jaxllm.scheduling.scheduler import Scheduler, StepLimits

OFFLINE = CacheSize(num_blocks=20_001, block_size=16)


class CountingEngine(FakeEngine):
    """Knows how many tokens of prompts were computed."""

    num_prompt_tokens = 0

    def launch(self) -> StepPlan:
        plan = super().launch()
        for row in plan.rows:
            self.num_prompt_tokens += max(min(row.end, row.request.prompt_len) - row.start, 0)
        return plan


def check_answers(engine: FakeEngine, requests: list[Request]) -> None:
    for request in requests:
        assert engine.answers[request.request_id] == expected_answer(request)[0]


def three_requests() -> list[Request]:
    """500 common tokens, then 50, 30 and 80 of their own."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(length)]

    common = text(500)
    return [prompt_request(str(length), common + text(length), 6) for length in (50, 30, 80)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_once", [True, False], ids=["all at once", "one by one"])
@pytest.mark.parametrize(
    ("block_size", "enable_prefix_caching", "computed"),
    [(4, True, 660), (16, True, 668), (16, False, 1660)],
    ids=["500 tokens are whole blocks", "496 tokens are whole blocks", "without prefix caching"],
)
def test_a_common_beginning_is_computed_once(depth, at_once, block_size, enable_prefix_caching, computed):
    """660 tokens of 1,660; with blocks of 16 the last 4 common tokens are in a begun block: twice 4 tokens more."""
    size = CacheSize(2400 // block_size, block_size)
    engine = CountingEngine(StepLimits(8, 2048), size, depth, enable_prefix_caching)
    requests = three_requests()
    for request in requests:
        engine.add(request)
        if not at_once:
            engine.run()
    if at_once:
        assert len(engine.launch().rows) == 3, "all are admitted in one step"
    engine.run()
    assert engine.num_prompt_tokens == computed
    cached = 500 // block_size * block_size if enable_prefix_caching else 0
    assert [request.num_cached for request in requests] == [0, cached, cached]
    check_answers(engine, requests)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [512, 16])
def test_the_prompt_of_several_answers_is_computed_once(depth, enable_prefix_caching, budget):
    engine = CountingEngine(StepLimits(8, budget), CacheSize(101, 16), depth, enable_prefix_caching)
    request = make_request("0", 55, 9)
    request.fork({str(index): index for index in range(1, 5)})
    requests = [request, *request.children]
    engine.add(request)
    shared = 0
    while engine.scheduler.has_unfinished:
        engine.step()
        engine.check_invariants()
        shared = max(shared, engine.scheduler.kv.stats().shared_blocks)
    engine.run()
    assert engine.num_prompt_tokens == 55 + 4, "each child computes the last token, to sample from it"
    assert shared == 3
    check_answers(engine, requests)
    assert len({tuple(engine.answers[one.request_id]) for one in requests}) == 5, "answers of other seeds"


def test_children_do_not_hold_up_others_and_go_before_who_came_later():
    engine = FakeEngine(StepLimits(4, 16), CacheSize(101, 4))
    first, second = make_request("a", 30, 9), make_request("b", 30, 9)
    first.fork({"a1": 1})
    engine.add(first)
    engine.add(second)
    plans = [[row.request.request_id for row in engine.launch().rows] for _ in range(3)]
    assert plans == [["a"], ["a", "b"], ["a", "b", "a1"]]


def test_children_run_even_if_their_parent_leaves_before_it_runs():
    engine = FakeEngine(StepLimits(1, 16), CacheSize(101, 4))
    engine.add(make_request("a", 3, 4))
    parent = make_request("b", 30, 9)
    parent.fork({"b1": 1, "b2": 2})
    children = parent.children
    engine.add(parent)
    engine.launch()
    engine.abort("b2")
    engine.abort("b")
    engine.check_invariants()
    engine.run()
    assert engine.finish_reasons == {"a": "length", "b": "abort", "b1": "length", "b2": "abort"}
    check_answers(engine, [children[0]])


def test_one_answer_of_one_token_leaves_its_prompt_to_the_others():
    """The parent is gone before its children can be forked: the prefix cache has its prompt."""
    engine = CountingEngine(StepLimits(8, 512), CacheSize(101, 4), depth=1)
    parent = make_request("0", 30, 1)
    parent.fork({"1": 1, "2": 2})
    requests = [parent, *parent.children]
    engine.add(parent)
    engine.run()
    check_answers(engine, requests)
    assert engine.num_prompt_tokens == 30 + 2 * 2


def test_the_next_turn_of_a_conversation_computes_only_what_is_new():
    engine = CountingEngine(StepLimits(8, 512), CacheSize(101, 4), depth=2)
    token_ids: list[int] = []
    for turn in range(5):
        message = [(turn + 50 * position) % VOCAB_SIZE for position in range(11)]
        request = prompt_request(str(turn), token_ids + message, 10)
        engine.add(request)
        engine.run()
        check_answers(engine, [request])
        # All but the answer's last token, which was never computed, in whole blocks.
        assert request.num_cached == max(len(token_ids) - 1, 0) // 4 * 4
        token_ids += message + request.output_ids


def test_a_preempted_request_comes_back_through_the_prefix_cache():
    engine = CountingEngine(StepLimits(4, 64), CacheSize(num_blocks=20, block_size=4))
    requests = [make_request(name, length, 12) for name, length in zip("abc", (20, 21, 22), strict=True)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert engine.num_prompt_tokens < 63 + 22, "the victim's prompt was not computed twice"
    check_answers(engine, requests)


def test_a_chat_service_takes_far_fewer_block_seconds():
    usages = {}
    for enable_prefix_caching in (True, False):
        scheduler = Scheduler(StepLimits(256, 8192), OFFLINE, enable_prefix_caching)
        usages[enable_prefix_caching] = Simulation(scheduler, make_conversations()).run()
        assert scheduler.kv.num_used_blocks == 0
    saved = 1 - usages[True].block_seconds / usages[False].block_seconds
    print(f"{100 * saved:.0f} % fewer block-seconds, {usages[True].computed_tokens} of", end=" ")
    print(f"{usages[False].computed_tokens} tokens computed")
    assert saved >= 0.4
    assert usages[True].computed_tokens < usages[False].computed_tokens / 4


def test_the_offline_workload_wastes_little():
    """256 sequences, prompts and answers of 100 to 1,024 tokens, in blocks of 16: half a block each, on average."""
    rng = random.Random(0)
    scheduler = Scheduler(StepLimits(256, 8192), OFFLINE)
    for index in range(256):
        prompt_len, max_tokens = rng.randint(100, 1024), rng.randint(100, 1024)
        scheduler.add(prompt_request(str(index), [rng.randrange(1000) for _ in range(prompt_len)], max_tokens))
    waste, used = [], []
    while scheduler.has_unfinished:
        plan, stats = scheduler.schedule(), scheduler.kv.stats()
        used.append(stats.used_blocks)
        waste.append(stats.used_blocks * 16 - stats.used_tokens)
        scheduler.update(plan, StepOutput([[1]] * len(plan.rows), [[0.0]] * len(plan.rows)))
    shares = [lost / (16 * blocks) for lost, blocks in zip(waste, used, strict=True)]
    print(f"waste: {sum(waste) / sum(used) / 16:.2%} of all block-steps, {statistics.median(shares):.2%} in the median")
    assert sum(waste) / sum(used) / 16 < 0.04
    assert max(shares) < 0.10, "while prompts are being computed, blocks wait for the rest of one"
