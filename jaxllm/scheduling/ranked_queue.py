"""A queue of requests by rank that any of them can leave.

Invariant: the heap holds an entry of every request in the queue, and of requests that left only until they
come to its front, or are more than those that stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxllm.request import Request

type Rank = tuple[float, ...]
"""Compared from the left; the lowest is next. Ranks of one queue are `are_alike`."""

FEW = 64
"""Entries that are not worth cleaning up."""


def are_alike(rank: object, other: object) -> bool:
    """Whether both are tuples of the same length, and the values at each place can be compared."""
    if not (isinstance(rank, tuple) and isinstance(other, tuple) and len(rank) == len(other)):
        return False
    try:
        return all((one < two) in (True, False) for one, two in zip(rank, other, strict=True))
    except (TypeError, ValueError):  # arrays raise the second: they have no single answer
        return False


class RankedQueue:
    """`peek` and `len` are O(1), the rest O(log n), all of them on average."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Request]] = []
        self._entries: dict[str, tuple[Rank, int, Request]] = {}

    def push(self, request: Request, rank: Rank, tie: int) -> None:
        """`tie` is the request's own number: of equal ranks the one with the lower comes first."""
        assert request.request_id not in self._entries, f"request {request.request_id} waits already"
        entry = (rank, tie, request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        return self._heap[0][2]

    def peek_rank(self) -> Rank:
        """The rank of who is next."""
        return self._heap[0][0]

    def pop(self) -> Request:
        request = self._heap[0][2]
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        del self._entries[request.request_id]
        heap = self._heap
        if len(heap) > 2 * len(self._entries) + FEW:
            self._heap = heap = list(self._entries.values())
            heapq.heapify(heap)
        while heap and self._entries.get(heap[0][2].request_id) is not heap[0]:
            heapq.heappop(heap)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order; O(n log n)."""
        return (request for _, _, request in sorted(self._entries.values()))
