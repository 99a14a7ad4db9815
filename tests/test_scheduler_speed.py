"""How long the scheduler takes per step: meant to stay under 500 us for 256 running requests on an idle core.

Run `pytest -m slow -s tests/test_scheduler_speed.py` for the figures. The assertions are loose, as other
programs share the machine: they catch work that grows with the queue or with the square of the batch.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import pytest
from doubles import make_request

from jaxllm.memory import CacheSize
from jaxllm.scheduling.plan import StepOutput
from jaxllm.scheduling.policy_choice import POLICIES, make_order, make_victims
from jaxllm.scheduling.scheduler import Scheduler, StepLimits

NUM_SEATS = 256
NUM_STEPS = 1000


@dataclass(frozen=True)
class Timing:
    """Microseconds per step."""

    schedule: list[float]
    update: list[float]

    @property
    def total(self) -> list[float]:
        return [one + other for one, other in zip(self.schedule, self.update, strict=True)]

    @property
    def best(self) -> float:
        """The fastest tenth: what other programs on the machine disturb least."""
        return statistics.quantiles(self.total, n=10)[0]

    def __str__(self) -> str:
        parts = [statistics.median(part) for part in (self.schedule, self.update, self.total)]
        return "schedule {:.0f} + update {:.0f} = {:.0f} us (median), {:.0f} us (fastest tenth)".format(
            *parts, self.best
        )


def decoding_scheduler(num_waiting: int, policy: str = "fcfs") -> Scheduler:
    """All seats taken by requests that decode for long, and others waiting."""
    order = make_order(policy)
    size = CacheSize(num_blocks=30_001, block_size=16)
    scheduler = Scheduler(StepLimits(NUM_SEATS, 8192), size, True, order, make_victims(None, order))
    for index in range(NUM_SEATS + num_waiting):
        scheduler.add(make_request(str(index), 100 + index % 50, 1700))
    while scheduler.num_running < NUM_SEATS or any(one.num_uncomputed > 1 for one in scheduler.running.values()):
        plan = scheduler.schedule()
        scheduler.update(plan, StepOutput([[7]] * len(plan.rows), [[-1.0]] * len(plan.rows)))
    assert (scheduler.num_running, scheduler.num_waiting) == (NUM_SEATS, num_waiting)
    return scheduler


def measure(num_waiting: int, policy: str) -> Timing:
    scheduler, timing = decoding_scheduler(num_waiting, policy), Timing([], [])
    output = StepOutput([[7]] * NUM_SEATS, [[-1.0]] * NUM_SEATS)
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule()
        between = time.perf_counter()
        scheduler.update(plan, output)
        timing.schedule.append((between - start) * 1e6)
        timing.update.append((time.perf_counter() - between) * 1e6)
        assert len(plan.rows) == NUM_SEATS
    return timing


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_of_256_requests_is_cheap_and_waiting_ones_cost_nothing(policy):
    alone, crowded = measure(0, policy), measure(10_000, policy)
    print(f"\n{policy}\n256 running:                 {alone}\n256 running, 10,000 waiting: {crowded}")
    assert alone.best < 3 * 500
    assert crowded.best < 3 * alone.best


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_leaving_a_long_queue_is_cheap(policy):
    scheduler = decoding_scheduler(10_000, policy)
    leaving = [request.request_id for request in scheduler.waiting][5000:]
    start = time.perf_counter()
    for request_id in leaving:
        scheduler.abort(request_id)
    per_abort = (time.perf_counter() - start) / 5000 * 1e6
    print(f"\n{policy}: abort with 10,000 waiting: {per_abort:.1f} us")
    assert per_abort < 50
