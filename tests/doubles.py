"""Stand-ins for the device: a runner that models paged memory, and a loop that drives a scheduler over it.

`FakeRunner` keeps what a device keeps (block tables and last tokens by seat, K/V by slot), learns of
changes from plans alone, and checks on every step that each row finds exactly its own tokens in its
blocks. A block given to two requests, a table change that was not told, a seat mixed up or a token
lost or doubled by a preemption is an AssertionError in the step that would have computed nonsense.
Its tokens depend on all tokens before them, so a schedule that computes the wrong thing also shows
in the answer.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.config import CacheSize
from jaxllm.outputs import TokenOutput
from jaxllm.request import FinishReason, Request, RequestStatus
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import PlanRow, StepOutput, StepPlan
from jaxllm.scheduling.scheduler import Scheduler

VOCAB_SIZE = 251  # a token is a byte


def make_request(request_id: str, prompt_len: int, max_tokens: int, eos: Sequence[int] = (), **params) -> Request:
    """A request whose prompt depends on its length alone."""
    prompt = tuple((7 * prompt_len + 13 * position) % VOCAB_SIZE for position in range(prompt_len))
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(request_id, prompt, sampling, frozenset(eos), max_len=prompt_len + max_tokens, seed=0)


def sample(request: Request, token_ids: Sequence[int]) -> int:
    """The token after `token_ids`: a function of all of them; no stop token below min_tokens."""
    token = zlib.crc32(bytes(token_ids)) % VOCAB_SIZE
    while len(token_ids) - request.prompt_len < request.params.min_tokens and token in request.stop_token_ids:
        token = (token + 1) % VOCAB_SIZE
    return token


def expected_answer(request: Request) -> tuple[list[int], FinishReason]:
    """What the request has to get, whatever else runs: computed one token at a time, without a scheduler."""
    token_ids = list(request.prompt_ids)
    while len(token_ids) < request.max_len:
        token_ids.append(sample(request, token_ids))
        if token_ids[-1] in request.stop_token_ids:
            return token_ids[request.prompt_len :], FinishReason.STOP
    return token_ids[request.prompt_len :], FinishReason.LENGTH


@dataclass(frozen=True)
class FakePendingStep:
    """A launched step; the host must not look at its tokens before it asks for the result."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


@dataclass(frozen=True)
class Entry:
    """What a slot of the cache holds: the K/V of one token."""

    request: Request
    position: int
    token_id: int


class FakeRunner:
    """Runs plans in the order they are launched, as a device does."""

    def __init__(self, num_seats: int, size: CacheSize) -> None:
        self.size = size
        self.slots: dict[tuple[int, int], Entry] = {}
        self.tables: list[dict[int, int]] = [{} for _ in range(num_seats)]
        self.last_tokens: list[int | None] = [None] * num_seats
        self.owners: list[Request | None] = [None] * num_seats
        self.token_ids: dict[Request, list[int]] = {}
        """Every token that exists on the device, per request: the prompt and all that was sampled."""

    def launch(self, plan: StepPlan) -> FakePendingStep:
        """Run a step: every row writes its K/V before any row reads, as in each layer of a model."""
        seats = [row.seat for row in plan.rows]
        assert len(set(seats)) == len(seats), f"a seat is in the plan twice: {seats}"
        for row in plan.rows:
            self._take_changes(row)
        for row in plan.rows:
            self._write(row)
        sampled = [self._compute(row) for row in plan.rows]
        return FakePendingStep(StepOutput(sampled, [-float(token) for token in sampled]))

    def _take_changes(self, row: PlanRow) -> None:
        """Like a device, a seat keeps its stale table and token until it is told of new ones."""
        if row.admitted:
            self.owners[row.seat] = row.request
            self.token_ids.setdefault(row.request, list(row.request.prompt_ids))
            assert row.first_new_block == 0 and row.new_block_ids, "an admitted request names all of its blocks"
        assert self.owners[row.seat] is row.request, f"seat {row.seat} belongs to another request"
        for index, block_id in enumerate(row.new_block_ids, row.first_new_block):
            assert 0 < block_id < self.size.num_blocks, f"block {block_id} does not exist"
            self.tables[row.seat][index] = block_id

    def _slot(self, seat: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.size.block_size)
        return self.tables[seat][index], offset

    def _write(self, row: PlanRow) -> None:
        for position, token_id in enumerate(self._input(row), row.start):
            self.slots[self._slot(row.seat, position)] = Entry(row.request, position, token_id)

    def _input(self, row: PlanRow) -> list[int]:
        """The row's tokens: known ones come from the host, one that is pending from the seat."""
        assert row.num_tokens > 0, "a row without tokens"
        if row.end <= row.num_known:
            return row.request.get_token_ids(row.start, row.end)
        assert row.num_tokens == 1, "a row has one pending token and no other"
        last_token = self.last_tokens[row.seat]
        assert last_token is not None, f"nothing was sampled on seat {row.seat}"
        return [last_token]

    def _compute(self, row: PlanRow) -> int:
        """Attend to the whole context and sample; a row that does not sample returns nonsense."""
        token_ids = self.token_ids[row.request]
        for position in range(row.end):
            found = self.slots.get(self._slot(row.seat, position))
            expected = Entry(row.request, position, token_ids[position])
            assert found == expected, f"{row.request.request_id}: {expected} is wanted, {found} is there"
        assert row.samples == (row.end == len(token_ids)), "a row samples if and only if it reaches the last token"
        if not row.samples:
            return VOCAB_SIZE
        token_ids.append(sample(row.request, token_ids))
        self.last_tokens[row.seat] = token_ids[-1]
        return token_ids[-1]


class FakeEngine:
    """A scheduler and a fake device with up to `depth` steps in flight; keeps what every request got."""

    def __init__(self, num_seats: int, budget: int, size: CacheSize, depth: int = 1) -> None:
        self.scheduler = Scheduler(num_seats, budget, size)
        self.runner = FakeRunner(num_seats, size)
        self.budget = budget
        self.depth = depth
        self.in_flight: deque[tuple[StepPlan, FakePendingStep]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.answers[request.request_id] = []
        self.finish_reasons.pop(request.request_id, None)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        ended = self.scheduler.abort(request_id, reason)
        if ended:
            self.finish_reasons[request_id] = reason
        return ended

    def launch(self) -> StepPlan:
        """Plan one step and launch it if there is anything to compute."""
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.budget, "the plan is over the budget"
        if plan:
            self.in_flight.append((plan, self.runner.launch(plan)))
        return plan

    def read(self) -> list[TokenOutput]:
        """Read the oldest step in flight."""
        plan, pending = self.in_flight.popleft()
        outputs = self.scheduler.update(plan, pending.result())
        for output in outputs:
            assert output.request_id not in self.finish_reasons, "an output after the last one"
            self.answers[output.request_id] += output.new_token_ids
            assert output.new_logprobs == tuple(-float(token) for token in output.new_token_ids)
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id] = output.finish_reason
        return outputs

    def step(self) -> list[TokenOutput]:
        """Launch until `depth` steps are in flight, then read the oldest."""
        while len(self.in_flight) < self.depth and self.launch():
            pass
        assert self.in_flight, "nothing to compute and nothing to read, but requests are unfinished"
        return self.read()

    def run(self) -> None:
        """Step until every request finished, and read what is still in flight."""
        while self.scheduler.has_unfinished:
            self.step()
        while self.in_flight:
            self.read()

    def check_invariants(self) -> None:
        """Everything that holds between any two calls of the scheduler."""
        scheduler = self.scheduler
        scheduler.kv.check_invariants()
        self._check_places()
        assert scheduler.kv.holders() == set(scheduler.running), "blocks are held by others than the running ones"
        pending = Counter(
            row.request
            for plan, _ in self.in_flight
            for row in plan.rows
            if row.samples and not row.request.is_finished
        )
        for request in scheduler.requests.values():
            assert request.num_pending == pending[request], f"{request.request_id}: pending tokens do not add up"
            assert request.num_computed < request.num_tokens, f"{request.request_id}: nothing is left to compute"
            assert request.num_tokens <= request.max_len, f"{request.request_id}: sampled past the length limit"
            num_slots = len(scheduler.kv.block_ids(request)) * scheduler.kv.block_size
            assert request.num_computed <= request.num_slots == num_slots, f"{request.request_id}: slots do not add up"

    def _check_places(self) -> None:
        """Every unfinished request is running or waiting, and all are in the order they came."""
        scheduler = self.scheduler
        ordered = [*scheduler.running.values(), *scheduler.waiting]
        assert len(ordered) == len(scheduler.requests) == len(set(ordered)), "a request is lost or in two places"
        arrivals = [request.arrival_time for request in ordered]
        assert arrivals == sorted(arrivals), "requests were overtaken"
        for request in ordered:
            runs = request.request_id in scheduler.running
            assert scheduler.requests[request.request_id] is request
            assert request.status is (RequestStatus.RUNNING if runs else RequestStatus.WAITING)
            assert (request.seat is not None) == runs
        taken = [request.seat for request in scheduler.running.values() if request.seat is not None]
        seats = sorted([*taken, *scheduler._free_seats])
        assert seats == list(range(len(self.runner.owners))), "a seat is lost or taken twice"
