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
order holds it; only running requests hold blocks; running requests are kept in admission order.
"""

from __future__ import annotations

import heapq
from collections import deque

from jaxllm.config import CacheSize
from jaxllm.outputs import TokenOutput
from jaxllm.request import FinishReason, Request, RequestStatus
from jaxllm.scheduling.kv_manager import NO_NEW_BLOCKS, KVManager, NewBlocks
from jaxllm.scheduling.plan import PlanRow, StepOutput, StepPlan
from jaxllm.scheduling.policy import FCFS, AdmissionOrder


class Scheduler:
    """Continuous batching under a budget of tokens, seats and blocks."""

    def __init__(
        self,
        num_seats: int,
        max_num_batched_tokens: int,
        cache_size: CacheSize,
        waiting: AdmissionOrder | None = None,
    ) -> None:
        self.kv = KVManager(cache_size)
        self.requests: dict[str, Request] = {}
        """Every unfinished request by its id."""
        self.running: dict[str, Request] = {}
        """Requests with a seat by their ids, in admission order."""
        self.waiting: AdmissionOrder = FCFS() if waiting is None else waiting
        self.num_preemptions = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_seats = list(range(num_seats))  # a heap: low seats first keeps the seats in use dense
        self._in_flight: deque[StepPlan] = deque()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, request: Request) -> None:
        """Let a new request wait for admission; the engine checked that it can be served."""
        assert request.request_id not in self.requests, f"request {request.request_id} is here already"
        assert 1 <= request.prompt_len < request.max_len, f"request {request.request_id} has no room for an answer"
        # The last token's K/V are never needed. A request that fits alone is what preemption relies on.
        fits = self.kv.num_new_blocks(request, request.max_len - 1) <= self.kv.num_blocks
        assert fits, f"request {request.request_id} may outgrow the whole cache"
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, stop_reason: int | str | None = None
    ) -> bool:
        """End a request from outside (its caller left, or a stop string came); False if it had ended before."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason, stop_reason)
        return True

    def schedule(self) -> StepPlan:
        """Plan the next step; the plan is empty if nothing can be computed before an earlier one is read."""
        rows: list[PlanRow] = []
        num_preemptions = self.num_preemptions
        budget = self._continue_running(rows, self._max_num_batched_tokens)
        # Who was preempted just now must not come back in the same step, whatever the policy says.
        if self.num_preemptions == num_preemptions:
            self._admit_waiting(rows, budget)
        plan = StepPlan(tuple(rows))
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
        for row, token_id, logprob in zip(plan.rows, output.token_ids, output.logprobs, strict=True):
            request = row.request
            if row.samples and request.finish_reason is None:
                request.append_token(token_id, logprob)
                if token_id in request.stop_token_ids or request.num_known >= request.max_len:
                    self._end_if_due(request, token_id)
                reason, stop_reason = request.finish_reason, request.stop_reason
                outputs.append(TokenOutput(request.request_id, (token_id,), (logprob,), reason, stop_reason))
        return outputs

    def _continue_running(self, rows: list[PlanRow], budget: int) -> int:
        """Give running requests their next tokens, in admission order; returns what is left of the budget."""
        for request in list(self.running.values()):
            if budget == 0:
                break
            # Preempted for one before it, or all it may grow to is sampled already and waits to be read.
            if request.seat is None or request.num_tokens >= request.max_len:
                continue
            end = request.num_computed + budget
            if end > request.num_tokens:  # min() would cost more than all checks of the loop
                end = request.num_tokens
            new_blocks = NO_NEW_BLOCKS if end <= request.num_slots else self._make_room(request, end)
            if new_blocks is not None:
                budget -= end - request.num_computed
                rows.append(_advance(request, end, new_blocks, False))
        return budget

    def _admit_waiting(self, rows: list[PlanRow], budget: int) -> None:
        """Seat waiting requests in the policy's order while there are tokens, seats and blocks for the next one."""
        while budget > 0 and self._free_seats and self.waiting and self._can_join(self.waiting.peek()):
            request = self.waiting.pop()
            end = min(request.num_tokens, request.num_computed + budget)
            new_blocks = self.kv.grow(request, end)
            assert new_blocks is not None, f"request {request.request_id} was admitted without room"
            self._take_seat(request)
            budget -= end - request.num_computed
            rows.append(_advance(request, end, new_blocks, True))

    def _can_join(self, request: Request) -> bool:
        """All of it has to fit now, so that it is not preempted before it sampled anything."""
        num_blocks = self.kv.num_new_blocks(request, request.num_tokens)
        return request.num_pending == 0 and num_blocks <= self.kv.num_free_blocks

    def _take_seat(self, request: Request) -> None:
        request.seat = heapq.heappop(self._free_seats)
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request

    def _make_room(self, request: Request, end: int) -> NewBlocks | None:
        """Get blocks for tokens [0, end), preempting if need be; None if `request` itself had to go.

        Victims are taken from the end of the admission order and rows are planned from its front, so
        a victim never has a row in the plan that is being built.
        """
        while (new_blocks := self.kv.grow(request, end)) is None:
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
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
        """Take everything from a running request; its tokens are computed again when it is readmitted."""
        self._vacate(request)
        request.status = RequestStatus.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push_front(request)

    def _finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.finish(reason, stop_reason)

    def _vacate(self, request: Request) -> None:
        assert request.seat is not None, f"request {request.request_id} has no seat"
        self.kv.free(request)
        heapq.heappush(self._free_seats, request.seat)
        request.seat = None
        del self.running[request.request_id]


def _advance(request: Request, end: int, new: NewBlocks, admitted: bool) -> PlanRow:
    """Make the row of tokens [num_computed, end) and count them as computed."""
    start, seat = request.num_computed, request.seat
    assert seat is not None, f"request {request.request_id} has no seat"
    samples = end == request.num_tokens
    request.num_computed = end
    if samples:
        request.num_tokens = end + 1
    # By position: keywords would double the time.
    return PlanRow(request, seat, start, end - start, request.num_known, new.first, new.ids, admitted, samples)
