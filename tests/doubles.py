"""Stand-ins for the device: a runner that models paged memory, and a loop that drives a scheduler over it.

`FakeRunner` keeps what a device keeps (block tables and last tokens by seat, K/V by slot, chunks of host memory), learns of
changes from plans alone, and checks on every step that each row finds exactly its own tokens in its
blocks. A block given to two requests, a table change that was not told, a seat mixed up or a token
lost or doubled by a preemption is an AssertionError in the step that would have computed nonsense.
Its tokens depend on all tokens before them, so a schedule that computes the wrong thing also shows
in the answer.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.memory import CacheSize
from jaxllm.outputs import TokenOutput
from jaxllm.request import FinishReason, Request, RequestStatus
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import BlockCopy, PlanRow, StepOutput, StepPlan, SwapIn, SwapOut
from jaxllm.scheduling.policy import AdmissionOrder
from jaxllm.scheduling.scheduler import Scheduler, StepLimits
from jaxllm.scheduling.swap_rule import SwapRule
from jaxllm.scheduling.victims import VictimChoice

VOCAB_SIZE = 251  # a token is a byte


def make_request(
    request_id: str, prompt_len: int, max_tokens: int, eos: Sequence[int] = (), family: int | None = None, **params
) -> Request:
    """A request whose prompt depends on its length alone, or is the beginning of its family's."""
    first = 7 * prompt_len if family is None else 11 * family
    prompt = tuple((first + 13 * position) % VOCAB_SIZE for position in range(prompt_len))
    return prompt_request(request_id, prompt, max_tokens, eos, **params)


def prompt_request(
    request_id: str, prompt: Sequence[int], max_tokens: int, eos: Sequence[int] = (), **params
) -> Request:
    """A request with this prompt."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(request_id, tuple(prompt), sampling, frozenset(eos), max_len=len(prompt) + max_tokens, seed=0)


def sample(request: Request, token_ids: Sequence[int]) -> int:
    """The token after `token_ids`: a function of all of them and of the seed; no stop token below min_tokens."""
    token = zlib.crc32(bytes(token_ids), request.seed) % VOCAB_SIZE
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
    is_ready: bool = True

    def result(self) -> StepOutput:
        return self.output


@dataclass(frozen=True)
class Entry:
    """What a slot of the cache holds: the K/V of one token, which depend on all tokens before it."""

    position: int
    token_id: int
    digest: int
    """Of the tokens up to this one."""


class FakeRunner:
    """Runs plans in the order they are launched, as a device does."""

    def __init__(self, num_seats: int, size: CacheSize) -> None:
        self.size = size
        self.slots: dict[tuple[int, int], Entry | None] = {}
        self.chunks: dict[int, list[list[Entry | None]]] = {}
        """What was swapped out last to each chunk, row by row."""
        self.tables: list[dict[int, int]] = [{} for _ in range(num_seats)]
        self.last_tokens: list[int | None] = [None] * num_seats
        self.owners: list[Request | None] = [None] * num_seats
        self.token_ids: dict[Request, list[int]] = {}
        """Every token that exists on the device, per request: the prompt and all that was sampled."""
        self.entries: dict[Request, list[Entry]] = {}
        """What the slots of those tokens have to hold."""

    def launch(self, plan: StepPlan) -> FakePendingStep:
        """Run a step: every row writes its K/V before any row reads, as in each layer of a model."""
        seats = [row.seat for row in plan.rows]
        assert len(set(seats)) == len(seats), f"a seat is in the plan twice: {seats}"
        self._swap(plan.swap_out, plan.swap_in)
        self._copy(plan.copies)
        for row in plan.rows:
            self._take_changes(row)
        sampled: list[list[int]] = [[] for _ in plan.rows]
        for index in range(plan.num_steps):
            rows = [(row, tokens) for row, tokens in zip(plan.rows, sampled, strict=True) if index < row.num_steps]
            rows = [(_after(row, index), tokens) for row, tokens in rows]
            for row, _ in rows:
                self._write(row)
            for row, tokens in rows:
                tokens.append(self._compute(row))
        return FakePendingStep(StepOutput(sampled, [[-float(token) for token in tokens] for tokens in sampled]))

    def _swap(self, swap_out: Sequence[SwapOut], swap_in: Sequence[SwapIn]) -> None:
        """First all that leaves, then what comes: a chunk may be written and read by the same plan."""
        offsets = range(self.size.block_size)
        for chunk, block_ids in swap_out:
            assert 0 <= chunk < self.size.host_chunks and 0 < len(block_ids) <= self.size.chunk_blocks
            self.chunks[chunk] = [[self.slots.get((block_id, offset)) for offset in offsets] for block_id in block_ids]
        destinations = [block_id for _, _, block_ids in swap_in for block_id in block_ids]
        assert len(set(destinations)) == len(destinations) and 0 not in destinations, "a block is brought back twice"
        for chunk, rows, block_ids in swap_in:
            assert 0 < len(rows) <= self.size.chunk_blocks
            for row, block_id in zip(rows, block_ids, strict=True):
                for offset in offsets:
                    self.slots[block_id, offset] = self.chunks[chunk][row][offset]

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Before any write of the step; whatever was in a destination is gone."""
        destinations = {copy.destination for copy in copies}
        assert len(destinations) == len(copies) and not destinations & {copy.source for copy in copies}
        for source, destination in copies:
            for offset in range(self.size.block_size):
                self.slots[destination, offset] = self.slots.get((source, offset))

    def _take_changes(self, row: PlanRow) -> None:
        """Like a device, a seat keeps its stale table and token until it is told of new ones."""
        if row.admitted:
            self.owners[row.seat] = row.request
            self.token_ids.setdefault(row.request, list(row.request.prompt_ids))
            self.entries.setdefault(row.request, [])
            assert row.first_new_block == 0 and row.new_block_ids, "an admitted request names all of its blocks"
        assert self.owners[row.seat] is row.request, f"seat {row.seat} belongs to another request"
        for index, block_id in enumerate(row.new_block_ids, row.first_new_block):
            assert 0 < block_id < self.size.num_blocks, f"block {block_id} does not exist"
            self.tables[row.seat][index] = block_id

    def _slot(self, seat: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.size.block_size)
        return self.tables[seat][index], offset

    def _write(self, row: PlanRow) -> None:
        entries, token_ids = self._entries(row.request), self.token_ids[row.request]
        for position, token_id in enumerate(self._input(row), row.start):
            assert token_id == token_ids[position], f"{row.request.request_id}: another token at {position}"
            self.slots[self._slot(row.seat, position)] = entries[position]

    def _entries(self, request: Request) -> list[Entry]:
        """One for every token that exists."""
        entries = self.entries[request]
        for position in range(len(entries), len(self.token_ids[request])):
            token_id = self.token_ids[request][position]
            before = entries[-1].digest if entries else 0
            entries.append(Entry(position, token_id, hash((before, token_id))))
        return entries

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
        token_ids, entries = self.token_ids[row.request], self._entries(row.request)
        for position in range(row.end):
            found, expected = self.slots.get(self._slot(row.seat, position)), entries[position]
            assert found == expected, f"{row.request.request_id}: {expected} is wanted, {found} is there"
        assert row.samples == (row.end == len(token_ids)), "a row samples if and only if it reaches the last token"
        if not row.samples:
            return VOCAB_SIZE
        token_ids.append(sample(row.request, token_ids))
        self.last_tokens[row.seat] = token_ids[-1]
        return token_ids[-1]


def _after(row: PlanRow, num_steps: int) -> PlanRow:
    """What the device does of a row after `num_steps` steps."""
    if num_steps == 0:
        return row
    assert row.num_tokens == 1 and row.samples, "only a row of one token goes on"
    return dataclasses.replace(row, start=row.start + num_steps)


class FakeEngine:
    """A scheduler and a fake device with up to `depth` steps in flight; keeps what every request got."""

    max_steps = 1
    """Decode steps that a call may do."""

    def __init__(
        self,
        limits: StepLimits,
        size: CacheSize,
        depth: int = 1,
        enable_prefix_caching: bool = True,
        swap_rule: SwapRule | None = None,
        waiting: AdmissionOrder | None = None,
        victims: VictimChoice | None = None,
    ) -> None:
        self.scheduler = Scheduler(limits, size, enable_prefix_caching, waiting, victims, swap_rule)
        self.keeps_arrival_order = waiting is None and victims is None
        self.runner = FakeRunner(limits.seats, size)
        self.limits = limits
        self.depth = depth
        self.in_flight: deque[tuple[StepPlan, FakePendingStep]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.preempted_at: dict[Request, tuple[int, int]] = {}
        """How often each request was preempted, and how many tokens it had the last time."""

    def add(self, request: Request) -> None:
        for one in (request, *request.children):
            self.answers[one.request_id] = []
            self.finish_reasons.pop(one.request_id, None)
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        ended = self.scheduler.abort(request_id, reason)
        if ended:
            self.finish_reasons[request_id] = reason
        return ended

    def launch(self) -> StepPlan:
        """Plan one step and launch it if there is anything to compute."""
        plan = self.scheduler.schedule(self.max_steps)
        assert plan.num_tokens <= self.limits.tokens, "the plan is over the budget"
        num_blocks = [len(row.new_block_ids) for row in plan.rows if not row.admitted]
        assert max(num_blocks, default=0) <= 1, "a row that has its seat already begins several blocks"
        num_blocks = [len(row.new_block_ids) for row in plan.rows if row.admitted]
        assert sum(num_blocks) <= self.limits.admitted_blocks, "more blocks are told than the step holds"
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
        self._check_progress()
        assert scheduler.kv.holders() == set(scheduler.running), "blocks are held by others than the running ones"
        pending: Counter[Request] = Counter()
        for plan, _ in self.in_flight:
            for row in plan.rows:
                if row.samples and not row.request.is_finished:
                    pending[row.request] += row.num_steps
        for request in scheduler.requests.values():
            assert request.num_pending == pending[request], f"{request.request_id}: pending tokens do not add up"
            assert request.num_computed < request.num_tokens, f"{request.request_id}: nothing is left to compute"
            assert request.num_tokens <= request.max_len, f"{request.request_id}: sampled past the length limit"
            num_slots = len(scheduler.kv.block_ids(request)) * scheduler.kv.block_size
            assert request.num_computed <= request.num_slots <= num_slots, f"{request.request_id}: slots do not add up"
            assert request.num_slots - request.num_computed < scheduler.kv.block_size, "a block's end would be missed"

    def _check_progress(self) -> None:
        """Between two preemptions of a request lies at least one token."""
        for request in self.scheduler.waiting:
            if request.num_preemptions > 0:
                count, num_tokens = self.preempted_at.get(request, (0, 0))
                if request.num_preemptions > count:
                    assert request.num_tokens > num_tokens, f"{request.request_id}: preempted again without progress"
                    self.preempted_at[request] = (request.num_preemptions, request.num_tokens)

    def _check_places(self) -> None:
        """Every unfinished request is running or waiting, and all but forks are in the order they came."""
        scheduler = self.scheduler
        ordered = [*scheduler.running.values(), *scheduler.waiting]
        forking = [r for r in scheduler.requests.values() if r.status is RequestStatus.WAITING_FOR_FORK]
        placed = [*ordered, *forking]
        assert len(placed) == len(scheduler.requests) == len(set(placed)), "a request is lost or in two places"
        assert all(child.parent and child in child.parent.children for child in forking), "a child is forgotten"
        assert sum(request.status is RequestStatus.SWAPPED for request in ordered) == scheduler.num_swapped
        arrivals = [request.arrival_time for request in ordered if request.parent is None]
        assert not self.keeps_arrival_order or arrivals == sorted(arrivals), "requests were overtaken"
        for request in ordered:
            runs = request.request_id in scheduler.running
            assert scheduler.requests[request.request_id] is request
            swapped = scheduler.kv.host.swapped(request) is not None
            assert not (runs and swapped), f"{request.request_id} runs, and is swapped out"
            waits = RequestStatus.SWAPPED if swapped else RequestStatus.WAITING
            assert request.status is (RequestStatus.RUNNING if runs else waits)
            assert (request.seat is not None) == runs
        taken = [request.seat for request in scheduler.running.values() if request.seat is not None]
        seats = sorted([*taken, *scheduler._free_seats])
        assert seats == list(range(len(self.runner.owners))), "a seat is lost or taken twice"
