"""Which requests compute which of their tokens in the next step, and what the step's result changes.

There is no prefill and no decode: every step brings requests nearer to their length, a chunk or a
token at a time. Steps are planned before earlier ones were read (run-ahead), which three rules keep
sound:

- `schedule` advances `num_computed` at once and counts the token that a row will sample in
  `num_tokens`; it is pending until `update`, oldest plan first, makes it known. A request may
  finish or lose its seat in between: what was computed past its end is dropped, and a token that was
  sampled before a preemption is as good as any other (the device computed it in order) and is kept.
- A preempted request is admitted again only once none of its tokens is pending, so that its new row
  starts from tokens the host knows.
- Seats and blocks are given on at once although launched steps may still write to them: the device
  runs steps in order, and the new owner writes before it reads.

Invariant: a request is running exactly when it has a seat and waiting exactly when the admission
order holds it (a swapped one waits, too); only running requests hold blocks of the device; running
requests are kept in admission order. A request has blocks for all of its tokens from its admission on,
so it needs others only for its answer; one that was preempted keeps them at least until it sampled again.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from jaxllm.memory import CacheSize
from jaxllm.outputs import TokenOutput
from jaxllm.request import FinishReason, Request, RequestStatus
from jaxllm.scheduling.displacement import Displacement
from jaxllm.scheduling.forks import Forks
from jaxllm.scheduling.kv_manager import NO_NEW_BLOCKS, KVManager, NewBlocks
from jaxllm.scheduling.long_prompts import LongPrompts
from jaxllm.scheduling.plan import PlanRow, StepOutput, StepPlan
from jaxllm.scheduling.policy import FCFS, AdmissionOrder, Load
from jaxllm.scheduling.swap_rule import SwapRule
from jaxllm.scheduling.thrash import ThrashCounter
from jaxllm.scheduling.victims import LastJoined, VictimChoice

WATERMARK = 0.01
"""Share of the blocks that an admission leaves free for those that run."""


@dataclass(frozen=True)
class StepLimits:
    """The most that one step may hold."""

    seats: int
    """Requests that run at once."""
    tokens: int
    admitted_blocks: int = sys.maxsize
    """Blocks of requests that take their seats in the step; not less than those of the longest request."""
    long_prompt_tokens: int = 0
    """Tokens of prompts that have more than this to go; 0 is no limit. See `LongPrompts`."""


class Scheduler:
    """Continuous batching under a budget of tokens, seats and blocks."""

    def __init__(
        self,
        limits: StepLimits,
        cache_size: CacheSize,
        enable_prefix_caching: bool = True,
        waiting: AdmissionOrder | None = None,
        victims: VictimChoice | None = None,
        swap_rule: SwapRule | None = None,
    ) -> None:
        self.kv = KVManager(cache_size, enable_prefix_caching, swap_rule)
        self.requests: dict[str, Request] = {}
        """Every unfinished request by its id."""
        self.running: dict[str, Request] = {}
        """Requests with a seat by their ids, in admission order."""
        self.waiting: AdmissionOrder = FCFS() if waiting is None else waiting
        self.thrash = ThrashCounter()
        self._limits = limits
        self._watermark = int(WATERMARK * self.kv.num_blocks)
        self._forks = Forks()
        self._victims: VictimChoice = LastJoined() if victims is None else victims
        self._displacement = Displacement(self._victims, self.kv, self._watermark, limits.tokens)
        self._long_prompts = LongPrompts(limits.long_prompt_tokens)
        self._free_seats = list(range(limits.seats))  # a heap: low seats first keeps the seats in use dense
        self._in_flight: deque[StepPlan] = deque()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    @property
    def num_swapped(self) -> int:
        """Those of the waiting requests whose K/V are in host memory."""
        return self.kv.host.num_swapped

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_preemptions(self) -> int:
        return self.thrash.num_preemptions

    def add(self, request: Request) -> None:
        """Let a new request and its children wait for admission; the engine checked that they can be served."""
        assert request.request_id not in self.requests, f"request {request.request_id} is here already"
        assert 1 <= request.prompt_len < request.max_len, f"request {request.request_id} has no room for an answer"
        # The last token's K/V are never needed. A request that fits alone is what preemption relies on.
        fits = self.kv.blocks_for(request.max_len - 1) <= self.kv.num_blocks
        assert fits, f"request {request.request_id} may outgrow the whole cache"
        for child in request.children:
            assert child.request_id not in self.requests, f"request {child.request_id} is here already"
        self.waiting.push(request)  # may raise, if the policy is a user's: then nothing has changed
        self.requests |= {one.request_id: one for one in (*request.children, request)}

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, stop_reason: int | str | None = None
    ) -> bool:
        """End a request from outside (its caller left, or a stop string came); False if it had ended before."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason, stop_reason)
        return True

    def schedule(self, max_steps: int = 1) -> StepPlan:
        """Plan the next step; the plan is empty if nothing can be computed before an earlier one is read.

        Where nobody waits and every row decodes, rows may run on for up to `max_steps` steps on the device;
        not more than a block has tokens, so that a row begins one new block at the most.
        """
        rows: list[PlanRow] = []
        self._forks.release(self.waiting)
        self.waiting.begin_step(Load(len(self.running), self._limits.seats, self.kv.usage))
        self._long_prompts.begin_step()
        # Who was preempted just now must not come back in the same step, whatever the policy says.
        displaced = self._displace() if self.waiting.preempts and self.waiting else ()
        num_preemptions = self.num_preemptions
        budget = self._continue_running(rows, self._limits.tokens)
        if self.num_preemptions == num_preemptions:
            self._admit_waiting(rows, budget, displaced)
        if max_steps > 1 and self.num_waiting == 0 and all(map(_may_run_on, rows)):
            self._run_on(rows, max_steps)
        plan = StepPlan(tuple(rows), *self.kv.take_moves()) if rows else StepPlan()
        if plan:
            self._in_flight.append(plan)
        return plan

    def update(self, plan: StepPlan, output: StepOutput) -> list[TokenOutput]:
        """Take in what the oldest plan in flight sampled.

        Every plan that is not empty has to come back here, even if its requests are all gone by then.
        """
        oldest = self._in_flight.popleft()
        assert plan is oldest, "plans have to be updated in the order they were scheduled"
        outputs: list[TokenOutput] = []
        for row, token_ids, logprobs in zip(plan.rows, output.token_ids, output.logprobs, strict=True):
            request = row.request
            if row.samples and request.finish_reason is None:
                if row.num_steps < len(token_ids):
                    token_ids, logprobs = token_ids[: row.num_steps], logprobs[: row.num_steps]
                num_known = request.num_known + len(token_ids)
                if num_known < request.max_len and request.stop_token_ids.isdisjoint(token_ids):
                    request.append_tokens(token_ids, logprobs)
                else:
                    count = _count_to_end(request, token_ids)
                    token_ids, logprobs = token_ids[:count], logprobs[:count]
                    request.append_tokens(token_ids, logprobs)
                    self._end_if_due(request, token_ids[-1])
                new, new_logprobs = tuple(token_ids), tuple(logprobs)
                reason, stop_reason = request.finish_reason, request.stop_reason
                # By position: keywords would double the time.
                outputs.append(
                    TokenOutput(request.request_id, new, new_logprobs, reason, stop_reason, request.num_cached)
                )
        return outputs

    def _run_on(self, rows: list[PlanRow], max_steps: int) -> None:
        """Let rows take further steps in the same call, each as many as it has room for without preempting."""
        for row in rows:
            request = row.request
            more = min(max_steps - 1, request.max_len - request.num_tokens)
            if more > 0 and request.num_computed + more > request.num_slots:
                new = self.kv.grow(request, request.num_computed + more)
                if new is None:
                    more = min(more, max(request.num_slots - request.num_computed, 0))
                elif new.ids:
                    row.first_new_block = row.first_new_block if row.new_block_ids else new.first
                    row.new_block_ids += new.ids
            if more > 0:
                row.num_steps += more
                request.num_computed += more
                request.num_tokens += more

    def _continue_running(self, rows: list[PlanRow], budget: int) -> int:
        """Give running requests their next tokens; returns what is left of the budget.

        In admission order, or in that of the victims' choice where blocks may run short: each takes one at the most.
        This runs for every request in every step: a call per row, or min(), would cost a fifth of the time.
        """
        order = list(self.running.values())
        if self.kv.num_free_blocks < len(order):
            order = self._victims.order(order)
        for request in order:
            if budget == 0:
                break
            seat, end = request.seat, request.num_tokens
            assert seat is not None, "a running request has no seat"
            if end >= request.max_len:  # all it may grow to is sampled already and waits to be read
                continue
            start = request.num_computed
            num_tokens, samples = end - start, True
            if num_tokens > 1:
                num_tokens = self._long_prompts.take(min(num_tokens, budget))
                samples, end = start + num_tokens == end, start + num_tokens
                if num_tokens == 0:
                    continue
            first, ids = NO_NEW_BLOCKS
            if end > request.num_slots:
                new_blocks = self._make_room(request, end, order)
                if new_blocks is None:
                    continue
                first, ids = new_blocks
            request.num_computed = end
            if samples:
                request.num_tokens = end + 1
            budget -= num_tokens
            rows.append(PlanRow(request, seat, start, num_tokens, request.num_known, first, ids, False, samples))
        return budget

    def _admit_waiting(self, rows: list[PlanRow], budget: int, displaced: Collection[Request]) -> None:
        """Seat waiting requests in the policy's order while there are tokens, seats and blocks for the next one."""
        room = self._limits.admitted_blocks
        while budget > 0 and self._free_seats and self.waiting and self.waiting.peek() not in displaced:
            table = self._get_table(self.waiting.peek(), room)
            if table is None:
                break
            request = self.waiting.pop()
            self._take_seat(request)
            end = request.num_computed + self._long_prompts.begin(request.num_uncomputed, budget)
            self.kv.grow(request, end)
            room -= len(table.ids)
            budget -= end - request.num_computed
            rows.append(_admitted_row(request, end, table))

    def _get_table(self, request: Request, room: int) -> NewBlocks | None:
        """Blocks for all of a request's tokens, if there are enough and the step can name them."""
        if request.num_pending > 0 or self.kv.blocks_for(request.num_tokens) > room:
            return None
        return self.kv.admit(request, reserve=self._watermark if self.running else 0)

    def _take_seat(self, request: Request) -> None:
        request.seat = heapq.heappop(self._free_seats)
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
            request.first_scheduled_time = time.monotonic()
        if request.children:
            self._forks.watch(request)

    def _displace(self) -> list[Request]:
        """Preempt running requests for the one that is next, if the policy lets it and that makes room for it."""
        displaced = self._displacement.choose(self.waiting, self.running.values(), bool(self._free_seats))
        for request in displaced:
            self._preempt(request)
        return displaced

    def _make_room(self, request: Request, end: int, order: list[Request]) -> NewBlocks | None:
        """Get blocks for tokens [0, end), preempting if need be; None if `request` had to go or has to pause.

        Victims are taken from the end of `order` and rows are planned from its front, so a victim never has
        a row in the plan that is being built. A request that was preempted before is no victim until it sampled
        again: it has all the blocks it needs for that, so the pause is short.
        """
        while (new_blocks := self.kv.grow(request, end)) is None:
            victim = order[-1]
            if victim.num_tokens == victim.preempted_len:
                return None
            self._preempt(order.pop())
            if victim is request:
                return None
        return new_blocks

    def _end_if_due(self, request: Request, token_id: int) -> None:
        """The token just read may be the last: a stop token (not below min_tokens) or all there is room for."""
        if token_id in request.stop_token_ids and len(request.output_ids) >= request.params.min_tokens:
            # vLLM's rule: a stop token of the caller's is the stop reason, the end-of-sequence token is none.
            is_eos = token_id in request.eos_token_ids and not request.params.ignore_eos
            self._finish(request, FinishReason.STOP, None if is_eos else token_id)
        elif request.num_known >= request.max_len:
            self._finish(request, FinishReason.LENGTH, None)

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; what is not swapped out is computed again when it is readmitted."""
        swapped = self.kv.swap_out(request)
        self._vacate(request)
        self.thrash.note(0 if swapped else request.num_computed)
        request.status = RequestStatus.SWAPPED if swapped else RequestStatus.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        request.preempted_len = request.num_tokens
        self.waiting.push_front(request)

    def _finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._vacate(request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.SWAPPED):
            self.kv.forget_swapped(request)
            self.waiting.remove(request)
        if request.children:
            self._forks.watch(request)
        del self.requests[request.request_id]
        request.finish(reason, stop_reason)
        self.waiting.note_finished(request)

    def _vacate(self, request: Request) -> None:
        assert request.seat is not None, f"request {request.request_id} has no seat"
        self.kv.free(request)
        heapq.heappush(self._free_seats, request.seat)
        request.seat = None
        del self.running[request.request_id]


def _count_to_end(request: Request, token_ids: list[int]) -> int:
    """How many of the tokens that were sampled are the request's: those up to the one that ends it."""
    most = min(request.max_len - request.num_known, len(token_ids))
    fewest = request.params.min_tokens - len(request.output_ids)
    for index in range(max(fewest - 1, 0), most):
        if token_ids[index] in request.stop_token_ids:
            return index + 1
    return most


def _may_run_on(row: PlanRow) -> bool:
    """The row has its seat already, and is one token that samples the next; no step of it has to be seen by the host."""
    return row.num_tokens == 1 and row.samples and not (row.admitted or row.request.single_steps)


def _admitted_row(request: Request, end: int, table: NewBlocks) -> PlanRow:
    """Make the row of tokens [num_computed, end) of a request that took its seat, and count them as computed."""
    start, seat = request.num_computed, request.seat
    assert seat is not None, f"request {request.request_id} has no seat"
    samples = end == request.num_tokens
    request.num_computed = end
    if samples:
        request.num_tokens = end + 1
    return PlanRow(request, seat, start, end - start, request.num_known, *table, True, samples)
