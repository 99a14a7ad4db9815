"""In which order waiting requests are admitted.

Invariant: an order holds every waiting request exactly once and nothing else; what it decides is who
is next, never whether there is room. `AdmissionOrder` is all that the scheduler knows of a policy: a
further one (by priority, shortest first) is one more class with these methods.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from jaxllm.request import Request


class AdmissionOrder(Protocol):
    """The waiting requests, in the order of some policy.

    Thousands may wait, and every step asks: `peek` and `len` have to be O(1), the others O(log n)
    or better. Between `peek` and `pop` the scheduler does nothing to the order, so both name the
    same request. While the request that is next cannot be admitted, nobody is: a policy never has to
    fear that a large request is overtaken for ever.
    """

    def push(self, request: Request) -> None:
        """A new request arrived."""
        ...

    def push_front(self, request: Request) -> None:
        """A preempted request is back: it goes before those that were not admitted yet.

        The scheduler preempts the last admitted first, so each comes before the one pushed just before.
        """
        ...

    def peek(self) -> Request:
        """The request to admit next; only called while some request waits."""
        ...

    def pop(self) -> Request:
        """Take out the request that `peek` shows."""
        ...

    def remove(self, request: Request) -> None:
        """A waiting request was aborted or finished; it may stand anywhere."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, next one first (for inspection)."""
        ...


class FCFS:
    """First come, first served.

    With preempted requests pushed to the front, the order is that of arrival: whatever runs came
    before whatever waits. An OrderedDict is the queue, as a deque would need O(n) to remove from the
    middle and a plain dict forgets where its front is.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        assert request.request_id not in self._queue, f"request {request.request_id} waits already"
        self._queue[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self.push(request)
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._queue.values()))

    def pop(self) -> Request:
        return self._queue.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._queue[request.request_id]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())
