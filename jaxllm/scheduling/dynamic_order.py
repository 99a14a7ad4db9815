"""`dynamic`: priority and waiting time decide, and size the more, the scarcer seats and memory are.

Invariant: every waiting request is in one queue per pressure, so that a change of pressure ranks nobody anew.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxllm.request import Request
from jaxllm.scheduling.policy import AdmissionOrder, Load
from jaxllm.scheduling.ranked_queue import RankedQueue

NUM_PRESSURES = 3
CACHE_IS_FULL = 0.9
"""Usage of the K/V cache from which on memory is scarce."""


class DynamicOrder(AdmissionOrder):
    """The lowest of `arrival + priority_seconds * priority + pressure * seconds_per_token * tokens` is next.

    `tokens` are those of the prompt (and of its answer so far, for a request that is back): what it takes to admit it.
    `pressure` is 0, and 1 more for each of these when a step is planned: more requests wait than can run at once; the
    K/V cache is 90 % full. So with little to do a priority of 1 less is worth `priority_seconds` of waiting, and under
    pressure the small ones go first: more of them fit. Nobody starves: each second of waiting counts. Those that are
    back go first.

    Args:
        priority_seconds: of waiting, that make up for a priority of 1 more.
        seconds_per_token: of waiting, that make up for a token, at a pressure of 1.
    """

    uses_priority = True

    def __init__(self, priority_seconds: float = 10.0, seconds_per_token: float = 0.01) -> None:
        for name, value in (("priority_seconds", priority_seconds), ("seconds_per_token", seconds_per_token)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r} is not valid: use a number of 0 or above")
        self.pressure = 0
        self._priority_seconds = priority_seconds
        self._seconds_per_token = seconds_per_token
        self._queues = tuple(RankedQueue() for _ in range(NUM_PRESSURES))
        self._number = 0

    def push(self, request: Request) -> None:
        self._number += 1
        self._push(request, True, self._number)

    def push_front(self, request: Request) -> None:
        self._number += 1
        self._push(request, False, -self._number)

    def peek(self) -> Request:
        return self._queues[self.pressure].peek()

    def pop(self) -> Request:
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        for queue in self._queues:
            queue.remove(request)

    def begin_step(self, load: Load) -> None:
        self.pressure = (len(self) > load.num_seats) + (load.cache_usage >= CACHE_IS_FULL)

    def __len__(self) -> int:
        return len(self._queues[0])

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queues[self.pressure])

    def _push(self, request: Request, is_new: bool, tie: int) -> None:
        due = request.arrival_time + self._priority_seconds * request.priority
        for pressure, queue in enumerate(self._queues):
            queue.push(request, (is_new, due + pressure * self._seconds_per_token * request.num_tokens), tie)
