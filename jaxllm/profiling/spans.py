"""Arithmetic of stretches of time.

Invariant: `shares` gives every moment at which anything runs away exactly once, so that what it returns adds up to
the time that the device was busy, however many streams or threads there were.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

type Span = tuple[float, float]
"""Start and end."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The time that any of the spans covers, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined


def intersect(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The time that both cover; both as `union` returns them."""
    common: list[Span] = []
    left = right = 0
    while left < len(first) and right < len(second):
        start = max(first[left][0], second[right][0])
        end = min(first[left][1], second[right][1])
        if end > start:
            common.append((start, end))
        if first[left][1] <= second[right][1]:
            left += 1
        else:
            right += 1
    return common


def subtract(whole: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """The time of the first that the second does not cover; both as `union` returns them."""
    if not whole:
        return []
    edges = [whole[0][0], *(edge for span in taken for edge in span), whole[-1][1]]
    gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]
    return intersect(whole, gaps)


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def shares(spans: Sequence[Span], is_container: Sequence[bool]) -> list[float]:
    """How much of the time each span has for itself.

    What runs at once shares the time evenly. A container, as a loop, has what nothing within it takes; of several the
    one that began last.
    """
    order = sorted(range(len(spans)), key=lambda index: spans[index][0])
    edges = sorted({edge for span in spans for edge in span})
    owned = [0.0] * len(spans)
    running: list[tuple[float, int]] = []  # heaps: ends first
    containers: list[int] = []
    begun = 0
    for now, after in itertools.pairwise(edges):
        while begun < len(order) and spans[order[begun]][0] <= now:
            index = order[begun]
            begun += 1
            if is_container[index]:
                containers.append(index)
            else:
                heapq.heappush(running, (spans[index][1], index))
        while running and running[0][0] <= now:
            heapq.heappop(running)
        containers = [index for index in containers if spans[index][1] > now]
        for _, index in running:
            owned[index] += (after - now) / len(running)
        if not running and containers:
            owned[containers[-1]] += after - now
    return owned
