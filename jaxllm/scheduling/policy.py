"""In which order waiting requests are admitted: what a scheduling policy is, and the two that need no estimate.

Invariant: an order holds every waiting request exactly once and nothing else; what it decides is who
is next, never whether there is room. `AdmissionOrder` is all that the scheduler knows of a policy.

A policy of one's own is a class with the methods of `AdmissionOrder`, mostly a `RankedOrder` with a
rank of its own. `scheduling_policy` takes an instance, or where to find the class, as "package.module:Class".
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from jaxllm.request import Request
from jaxllm.scheduling.ranked_queue import Rank, RankedQueue, are_alike

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Load:
    """How busy the engine is when a step is planned."""

    num_running: int
    num_seats: int
    """Requests that can run at once."""
    cache_usage: float
    """Share of the K/V cache's blocks that requests hold, from 0 to 1."""


class AdmissionOrder(Protocol):
    """The waiting requests, in the order of some policy.

    Thousands may wait, and every step asks: `peek`, `len`, `begin_step` and `may_preempt` have to be O(1), the others
    O(log n) or better. `peek` and `pop` name the same request, and `peek` goes on naming it until a request comes or
    goes or the next step begins. While the request that is next cannot be admitted, nobody is: a policy never
    has to fear that a large request is overtaken for ever by those that it puts behind it.

    Who inherits from this class gets the methods that do nothing from it, and has to write the others.
    """

    uses_priority: ClassVar[bool] = False
    """Whether `Request.priority` makes a difference. Where it makes none, a request with one is refused."""
    preempts: ClassVar[bool] = False
    """Whether `may_preempt` is ever true: it is asked only then."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """A new request arrived, at `request.arrival_time`."""
        ...

    @abstractmethod
    def push_front(self, request: Request) -> None:
        """A request comes back that had been admitted: it was preempted (or is a further answer to an admitted prompt).

        It goes before those that were never admitted, as far as the policy's rules let it. Several may be back.
        """
        ...

    @abstractmethod
    def peek(self) -> Request:
        """The request to admit next; only called while some request waits."""
        ...

    @abstractmethod
    def pop(self) -> Request:
        """Take out the request that `peek` shows."""
        ...

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A waiting request was aborted or finished; it may stand anywhere."""
        ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, next one first (for inspection; may be slow)."""
        ...

    def begin_step(self, load: Load) -> None:
        """A step is about to be planned: the one moment at which the order of those who wait may change by itself."""

    def note_finished(self, request: Request) -> None:
        """A request ended, for the reason that `request.finish_reason` says; it does not wait here any more."""

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting`, which is next, may take the seat and the blocks of `running` if there are no others.

        Never true both ways, at once or one after the other: the two would push each other out.
        """
        return False


class RankedOrder(AdmissionOrder):
    """An order in which a request gets a rank when it comes, the lowest is next, and ranks do not change.

    A rank may well grow with `arrival_time`: where each second counts as much as so much of something else, waiting
    makes up for it, and still no rank has to be computed again.
    """

    def __init__(self) -> None:
        self._queue = RankedQueue()
        self._number = 0
        self._first_rank: Rank | None = None
        """All others have to be like it: any two in the queue can then be compared, whatever comes and goes."""

    @abstractmethod
    def rank(self, request: Request, is_back: bool) -> Rank:
        """The request's rank; `is_back` says that it had been admitted before.

        All ranks of a policy are tuples of the same length, with numbers (or texts) at the same places.
        """
        ...

    def push(self, request: Request) -> None:
        """Lets it wait, by its rank.

        Raises:
            ValueError: the rank cannot be compared with others; the request does not wait then.
        """
        rank = self.rank(request, False)
        if fault := self._fault(rank):
            raise ValueError(fault)
        self._number += 1
        self._queue.push(request, rank, self._number)

    def push_front(self, request: Request) -> None:
        """Lets it wait, by its rank; as the next one, if that rank cannot be compared with others.

        An error would end the engine here, and with it everybody's requests.
        """
        rank = self.rank(request, True)
        if fault := self._fault(rank):
            logger.error("%s. Request %s, which comes back, is next", fault, request.request_id)
            rank = self._queue.peek_rank() if self._queue else self._first_rank
            assert rank is not None, "nobody comes back who was never pushed"
        self._number += 1
        self._queue.push(request, rank, -self._number)

    def _fault(self, rank: Rank) -> str | None:
        """What is wrong with a rank that is new; None if nothing is."""
        known = self._first_rank
        if are_alike(rank, rank if known is None else known):
            self._first_rank = rank if known is None else known
            return None
        before = "" if known is None else f", and {known!r} before"
        return (
            f"scheduling_policy: {type(self).__name__}.rank returned {rank!r}{before}, which cannot be compared: have it "
            "return a tuple, always of the same length, with numbers (or texts) at the same places"
        )

    def peek(self) -> Request:
        return self._queue.peek()

    def pop(self) -> Request:
        return self._queue.pop()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class FCFS(RankedOrder):
    """First come, first served; those that are back go first, by their arrival."""

    def rank(self, request: Request, is_back: bool) -> Rank:
        return (not is_back, request.arrival_time if is_back else 0.0)


class PriorityOrder(RankedOrder):
    """The lowest `Request.priority` is next, then who is back, then who came first; it may preempt higher numbers.

    As in vLLM. While urgent requests come faster than they can be served, the others wait: `dynamic` lets
    waiting make up for priority.
    """

    uses_priority = True
    preempts = True

    def rank(self, request: Request, is_back: bool) -> Rank:
        return (request.priority, not is_back, request.arrival_time)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority
