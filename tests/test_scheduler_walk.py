"""The same tokens under every schedule.

First the schedules one would name (alone, batched, chunked, preempted, any number of steps in flight), then
random walks: add, fork, abort, launch and read in any order, with every invariant of scheduler, block tables,
pool and hash map checked after each action. Prompts are of three families, so that they begin alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from doubles import FakeEngine, expected_answer, make_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.config import PreemptionVictim
from jaxllm.memory import CacheSize, SwapCosts
from jaxllm.request import FinishReason, Request
from jaxllm.scheduling.policy_choice import POLICIES, VICTIMS, make_order, make_victims
from jaxllm.scheduling.scheduler import StepLimits
from jaxllm.scheduling.swap_rule import SwapRule


def mixed_requests() -> list[Request]:
    """Sixteen of mixed lengths; some stop early at one of many stop tokens."""
    stops = range(0, 251, 5)
    return [
        make_request(str(i), 1 + 7 * i % 40, 3 + 5 * i % 30, eos=stops if i % 3 == 0 else (), min_tokens=i % 4 // 2)
        for i in range(16)
    ]


@pytest.mark.parametrize("max_steps", [1, 4])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("num_seats", "budget", "num_blocks", "preempts"),
    [
        (1, 512, 201, False),
        (16, 512, 201, False),
        (16, 5, 201, False),
        (16, 64, 24, True),
        (6, 16, 20, True),
    ],
    ids=["alone", "batched", "chunked", "preempted", "chunked and preempted"],
)
def test_every_schedule_gives_the_same_tokens(max_steps, depth, num_seats, budget, num_blocks, preempts):
    engine = FakeEngine(StepLimits(num_seats, budget), CacheSize(num_blocks, block_size=4), depth)
    engine.max_steps = max_steps
    requests = mixed_requests()
    for request in requests:
        engine.add(request)
    engine.run()
    for request in requests:
        expected, reason = expected_answer(request)
        assert engine.answers[request.request_id] == request.output_ids == expected
        assert engine.finish_reasons[request.request_id] == reason
    assert (engine.scheduler.num_preemptions > 0) == preempts
    assert engine.scheduler.kv.num_used_blocks == 0


@pytest.fixture(scope="module", autouse=True)
def impatience():
    """Walks are short: the urgent push others out soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxllm.scheduling.displacement.PATIENCE", 1)
        yield


MAX_LEN = 40
BLOCK_SIZES = [1, 2, 4, 8]
RULES = {
    "swap": SwapRule("swap"),
    "recompute": SwapRule("recompute"),
    "auto": SwapRule("auto", SwapCosts(chunk_bytes=1, out_seconds=1.0, in_seconds=0.6, token_seconds=1.0)),
}


@dataclass(frozen=True)
class Shape:
    """Everything a scheduler is made with; the cache holds one longest request and `spare` blocks more."""

    num_seats: int
    budget: int
    block_size: int
    spare: int
    depth: int
    enable_prefix_caching: bool
    room: int
    """Blocks that a step can tell the device of admitted requests, beyond those of the longest."""
    max_steps: int
    host_chunks: int = 0
    chunk_blocks: int = 1
    swap_rule: SwapRule = RULES["swap"]
    policy: str = "fcfs"
    victims: PreemptionVictim = "last_joined"
    long_prompt_tokens: int = 0

    def engine(self) -> FakeEngine:
        longest = -(-(MAX_LEN - 1) // self.block_size)
        limits = StepLimits(self.num_seats, self.budget, longest + self.room, self.long_prompt_tokens)
        size = CacheSize(longest + 1 + self.spare, self.block_size, self.host_chunks, self.chunk_blocks)
        order, victims = None, None
        if (self.policy, self.victims) != ("fcfs", "last_joined"):
            order = make_order(self.policy)
            victims = make_victims(self.victims, order)
        engine = FakeEngine(limits, size, self.depth, self.enable_prefix_caching, self.swap_rule, order, victims)
        engine.max_steps = min(self.max_steps, self.block_size)
        return engine


class Walk:
    """Carries out actions on an engine and knows what every request has to end as."""

    def __init__(self, shape: Shape) -> None:
        self.engine = shape.engine()
        self.requests: list[Request] = []
        self.aborted: set[str] = set()

    def add(self, prompt_len: int, max_tokens: int, stops: int, family: int, n: int, priority: int = 0) -> None:
        """A request with `n` answers that stops at every token id that is a multiple of `stops`."""
        prompt_len = min(prompt_len, MAX_LEN - 1)
        max_tokens = min(max_tokens, MAX_LEN - prompt_len)
        number, eos, min_tokens = len(self.requests), range(0, 251, stops), max_tokens // 4
        request = make_request(str(number), prompt_len, max_tokens, eos, family=family, min_tokens=min_tokens)
        request.priority = priority
        request.fork({str(number + index): index for index in range(1, n)})
        self.requests += [request, *request.children]
        self.engine.add(request)

    def abort(self, index: int) -> None:
        unfinished = list(self.engine.scheduler.requests)
        if unfinished:
            request_id = unfinished[index % len(unfinished)]
            assert self.engine.abort(request_id)
            self.aborted.add(request_id)

    def launch(self) -> None:
        if len(self.engine.in_flight) < self.engine.depth:
            self.engine.launch()

    def read(self) -> None:
        if self.engine.in_flight:
            self.engine.read()

    def finish(self) -> None:
        """Run to the end: everything was answered rightly and nothing is held any more."""
        self.engine.run()
        self.engine.check_invariants()
        assert self.engine.scheduler.kv.num_used_blocks == 0
        for request in self.requests:
            self._check_answer(request)

    def _check_answer(self, request: Request) -> None:
        expected, reason = expected_answer(request)
        got = self.engine.answers[request.request_id]
        assert got == request.output_ids and request.num_pending == 0
        if request.request_id in self.aborted:
            assert got == expected[: len(got)] and request.finish_reason is FinishReason.ABORT
        else:
            assert got == expected and request.finish_reason is reason


ACTIONS = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, MAX_LEN),
        st.integers(1, MAX_LEN),
        st.sampled_from([3, 20, 500]),
        st.integers(0, 2),
        st.sampled_from([1, 1, 2, 5]),
        st.sampled_from([0, 0, -1, 3]),
    ),
    st.tuples(st.just("abort"), st.integers(0, 99)),
    st.tuples(st.just("launch")),
    st.tuples(st.just("launch")),
    st.tuples(st.just("read")),
)
SHAPES = st.builds(
    Shape,
    num_seats=st.integers(1, 8),
    budget=st.integers(1, 60),
    block_size=st.sampled_from(BLOCK_SIZES),
    spare=st.integers(0, 20),
    depth=st.integers(1, 4),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    room=st.integers(0, 20),
    max_steps=st.sampled_from([1, 1, 2, 4]),
    host_chunks=st.sampled_from([0, 1, 3, 8, 50]),
    chunk_blocks=st.sampled_from([1, 2, 5]),
    swap_rule=st.sampled_from([*RULES.values()]),
    policy=st.sampled_from(["fcfs", *POLICIES]),
    victims=st.sampled_from(["last_joined", *VICTIMS]),
    long_prompt_tokens=st.sampled_from([0, 0, 1, 10]),
)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shape=SHAPES, actions=st.lists(ACTIONS, max_size=60))
def test_any_actions(shape: Shape, actions: list[tuple]):
    walk = Walk(shape)
    for name, *arguments in actions:
        getattr(walk, name)(*arguments)
        walk.engine.check_invariants()
    walk.finish()


@pytest.mark.parametrize("seed", range(40))
def test_long_walk(seed: int):
    """1000 random actions under load: requests arrive faster than the small cache lets them be served."""
    rng = random.Random(seed)
    block_size = BLOCK_SIZES[seed % 4]
    spare = rng.randint(0, MAX_LEN // block_size)
    budget, caching, room = rng.choice([4, 16, 64]), seed % 7 != 0, rng.choice([0, 5, 100])
    host = (0, 1, RULES["swap"]), (4, 5, RULES["swap"]), (30, 2, RULES["auto"]), (10, 4, RULES["recompute"])
    shape = rng.randint(4, 8), budget, block_size, spare, 1 + seed % 5, caching, room, 1 + seed % 4
    choice = ["fcfs", *POLICIES][seed % 5], ["last_joined", *VICTIMS][seed // 5 % 4], (0, 0, 8)[seed % 3]
    walk = Walk(Shape(*shape, *host[seed // 4 % 4], *choice))
    num_swapped = 0
    for _ in range(1000):
        action = rng.choices(["add", "abort", "launch", "read"], [2, 0.3, 10, 9])[0]
        if action == "add":
            lengths = rng.randint(1, MAX_LEN), rng.randint(1, MAX_LEN)
            stops, family, n = rng.choice([3, 20, 500]), rng.randrange(3), rng.choice([1, 1, 1, 1, 3])
            walk.add(*lengths, stops, family, n, rng.choice([0, 0, 0, -1, 3]))
        elif action == "abort":
            walk.abort(rng.randrange(99))
        else:
            getattr(walk, action)()
        walk.engine.check_invariants()
        num_swapped = max(num_swapped, walk.engine.scheduler.num_swapped)
    walk.finish()
    cache = walk.engine.scheduler.kv.stats().prefix_cache
    assert walk.engine.scheduler.num_preemptions > 0, "the walk was meant to be tight"
    assert (num_swapped > 0) == (seed // 4 % 4 in (1, 2)), "the walk was meant to swap, or not to"
    if caching:
        assert cache.hits > cache.host_hits, "the walk was meant to share"
        assert (cache.host_hits > 0) == (seed // 4 % 4 > 0), "the walk was meant to bring blocks back, or not to"
