"""The scheduler over a device that is only a clock: requests come at random, steps take what a cost model says.

The cost model is Llama-3.1-8B in bfloat16 on one NVIDIA H200, as measured: a step takes
`OVERHEAD + max(weights read, multiplications) + K/V read`. It gives 4.5 ms for 1 row of 512 tokens (measured: 4.4),
5.6 for 64 (6.1), 11.0 for 256 (12.1), 12.6 for a prompt of 512 (11.3) and 189 for one of 8192 (186).

Invariant: whatever the policy, the requests of a seed are the same; their true lengths are known here alone.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxllm.memory import CacheSize
from jaxllm.request import Request
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import StepOutput, StepPlan
from jaxllm.scheduling.policy import AdmissionOrder
from jaxllm.scheduling.scheduler import Scheduler, StepLimits
from jaxllm.scheduling.victims import VictimChoice

OVERHEAD = 0.9e-3
"""Seconds of a step's small kernels."""
WEIGHTS = 15.0e9 / 4.3e12
"""Seconds to read the weights that a step multiplies with (the table of embeddings is not)."""
KV_PER_TOKEN = 131072 / 4.3e12
"""Seconds to read the K/V of a token."""
MULTIPLY_PER_TOKEN = 2 * 7.5e9 / 655e12
"""Seconds to multiply the weights with a token."""

MAX_TOKENS, MAX_MODEL_LEN = 1024, 8192
type Join = Callable[[Sequence[Job], int, float, Scheduler], int]

END, OTHER = 0, 1
"""Tokens: one that ends an answer, and one that does not."""


@dataclass(frozen=True)
class Workload:
    """What is asked for. Lengths are lognormal."""

    prompt_median: float = 300.0
    prompt_sigma: float = 1.0
    output_median: float = 150.0
    output_sigma: float = 1.0
    correlation: float = 0.0
    """Of the logarithms of a request's two lengths."""
    urgent_share: float = 0.1
    """Requests of priority 0 instead of 1."""

    def make(self, count: int, rate: float, seed: int) -> list[Job]:
        """Requests that arrive at random, `rate` a second on average; all at once if it is 0."""
        rng, now, jobs = random.Random(seed), 0.0, list[Job]()
        for number in range(count):
            now += rng.expovariate(rate) if rate else 0.0
            one, other = rng.gauss(), rng.gauss()
            other = self.correlation * one + (1 - self.correlation**2) ** 0.5 * other
            prompt = round(self.prompt_median * 2.718281828 ** (self.prompt_sigma * one))
            output = round(self.output_median * 2.718281828 ** (self.output_sigma * other))
            prompt = max(min(prompt, MAX_MODEL_LEN - MAX_TOKENS), 1)
            jobs.append(
                Job(number, now, prompt, max(min(output, MAX_TOKENS), 1), int(rng.random() > self.urgent_share))
            )
        return jobs


@dataclass
class Job:
    """A request with its true length, and what became of it."""

    number: int
    arrival: float
    prompt_len: int
    output_len: int
    priority: int
    first_token: float | None = None
    finished: float | None = None

    @property
    def latency(self) -> float:
        assert self.finished is not None, f"request {self.number} did not finish"
        return self.finished - self.arrival

    def make_request(self) -> Request:
        request = Request(
            str(self.number),
            (OTHER,) * self.prompt_len,
            SamplingParams(max_tokens=MAX_TOKENS),
            frozenset([END]),
            max_len=self.prompt_len + MAX_TOKENS,
            seed=0,
            priority=self.priority,
        )
        request.arrival_time = self.arrival
        return request


@dataclass(frozen=True)
class Machine:
    """What a scheduler is given."""

    seats: int
    blocks: int
    tokens: int = 8192
    block_size: int = 16

    def make_scheduler(self, order: AdmissionOrder, victims: VictimChoice | None = None) -> Scheduler:
        size = CacheSize(self.blocks + 1, self.block_size)
        return Scheduler(StepLimits(self.seats, self.tokens), size, False, order, victims)


@dataclass
class Result:
    """A whole run."""

    jobs: Sequence[Job]
    seconds: float = 0.0
    busy_seats: float = 0.0
    """Seats with a row, times seconds."""
    num_computed: int = 0
    """Tokens, as often as they were."""
    num_preemptions: int = 0
    seats_in_use: list[tuple[float, int]] = field(default_factory=list)
    """When, and how many, for every step."""

    @property
    def output_rate(self) -> float:
        """Tokens of answers a second."""
        return sum(job.output_len for job in self.jobs) / self.seconds

    @property
    def request_rate(self) -> float:
        return len(self.jobs) / self.seconds

    @property
    def recomputed_share(self) -> float:
        """Tokens computed again, in those computed."""
        needed = sum(job.prompt_len + job.output_len - 1 for job in self.jobs)
        return 1 - needed / self.num_computed

    def latencies(self, keep: Callable[[Job], bool] = lambda job: True) -> list[float]:
        return sorted(job.latency for job in self.jobs if keep(job))

    def mean(self, keep: Callable[[Job], bool] = lambda job: True) -> float:
        return statistics.fmean(self.latencies(keep))

    def percentile(self, percent: float, keep: Callable[[Job], bool] = lambda job: True) -> float:
        latencies = self.latencies(keep)
        return latencies[min(int(len(latencies) * percent / 100), len(latencies) - 1)]


def step_seconds(plan: StepPlan) -> float:
    """What the cost model says."""
    num_tokens = num_read = 0
    for row in plan.rows:
        num_tokens += row.num_tokens
        num_read += row.start + row.num_tokens
    return OVERHEAD + max(WEIGHTS, num_tokens * MULTIPLY_PER_TOKEN) + num_read * KV_PER_TOKEN


def as_they_come(jobs: Sequence[Job], first: int, now: float, scheduler: Scheduler) -> int:
    """Continuous batching: who is here may join. Returns the number of the first job, from `first` on, that may not."""
    while first < len(jobs) and jobs[first].arrival <= now:
        first += 1
    return first


def in_batches(machine: Machine, jobs: Sequence[Job], first: int, now: float, scheduler: Scheduler) -> int:
    """Static batching: nobody joins before all are done, and memory is reserved for the longest answer of each.

    Who is done takes no time any more, and prompts are not padded, which is more than many such engines had.
    """
    room, seats = (0, 0) if scheduler.has_unfinished else (machine.blocks, machine.seats)
    while seats > 0 and first < len(jobs) and jobs[first].arrival <= now:
        room -= scheduler.kv.blocks_for(jobs[first].prompt_len + MAX_TOKENS)
        if room < 0:
            break
        first, seats = first + 1, seats - 1
    return first


def simulate(jobs: Sequence[Job], scheduler: Scheduler, join: Join = as_they_come) -> Result:
    """Serve the jobs, which come in the order of their arrival."""
    result, now, first = Result(jobs), 0.0, 0
    while first < len(jobs) or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, jobs[first].arrival)
        last = join(jobs, first, now, scheduler)
        for job in jobs[first:last]:
            scheduler.add(job.make_request())
        first = last
        plan = scheduler.schedule()
        seconds = step_seconds(plan)
        now += seconds
        _read(plan, scheduler, jobs, now)
        result.busy_seats += len(plan.rows) * seconds
        result.num_computed += plan.num_tokens
        result.seats_in_use.append((now, len(plan.rows)))
    result.seconds, result.num_preemptions = now - jobs[0].arrival, scheduler.num_preemptions
    return result


def _read(plan: StepPlan, scheduler: Scheduler, jobs: Sequence[Job], now: float) -> None:
    """Bring the step's tokens in: each answer ends where its job says."""
    tokens = []
    for row in plan.rows:
        job, request = jobs[int(row.request.request_id)], row.request
        ends = row.samples and len(request.output_ids) + 1 == job.output_len
        tokens.append([END if ends else OTHER])
    for output in scheduler.update(plan, StepOutput(tokens, [[0.0]] * len(tokens))):
        job = jobs[int(output.request_id)]
        if job.first_token is None:
            job.first_token = now
        if output.finish_reason is not None:
            job.finished = now
