"""What the host did during a session: calls and their reads, and whether the device worked meanwhile.

Reads come in the order of launches. Invariant: time in which nothing was launched that was not read is nobody's: an
engine that waits for requests is not slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.profiling.host_work import BETWEEN, HOST_WORK, LAUNCH, READ
from jaxllm.profiling.spans import Span, intersect, length, subtract, union
from jaxllm.profiling.trace import HostEvent
from jaxllm.profiling.work import Load


@dataclass(frozen=True)
class Call:
    """One call of a compiled step."""

    bucket: str
    load: Load
    launched: float
    """When its launch began."""
    read: float | None
    """When its result was there; None: not within the session."""


@dataclass(frozen=True)
class HostPart:
    """One kind of the host's work. Nanoseconds."""

    name: str
    hidden: float
    """While the device worked."""
    exposed: float
    """While the device had nothing to do."""


def find_calls(host: Sequence[HostEvent], num_unread: int) -> list[Call]:
    """The session's calls, in order; `num_unread` calls before it were read within it."""
    reads = [event.end for event in host if event.name == READ][num_unread:]
    launches = [event for event in host if event.name == LAUNCH]
    pairs = itertools.zip_longest(launches, reads[: len(launches)])
    return [Call(event.facts["bucket"], _load(event), event.start, read) for event, read in pairs]


def in_flight(calls: Sequence[Call], end: float) -> list[Span]:
    """When at least one call was launched and not read; the session ends at `end`."""
    return union((call.launched, end if call.read is None else call.read) for call in calls)


def periods(calls: Sequence[Call], launched: Sequence[Span]) -> dict[str, tuple[float, float]]:
    """By bucket: nanoseconds between reads, and the steps that came with them. The clock is the host's.

    The first read has nothing before it; only time in which something was `launched` and not read counts.
    """
    known: dict[str, tuple[float, float]] = {}
    for before, after in itertools.pairwise([call for call in calls if call.read is not None]):
        assert before.read is not None and after.read is not None, "only those that were read"
        time, steps = known.get(after.bucket, (0.0, 0.0))
        time += length(intersect([(before.read, after.read)], launched))
        known[after.bucket] = time, steps + after.load.steps
    return known


def host_parts(host: Sequence[HostEvent], active: Sequence[Span], busy: Sequence[Span]) -> list[HostPart]:
    """What the host did within `active`, while the device was `busy` and while it was not."""
    spans = {name: union(event[:2] for event in host if event.name == name) for name in HOST_WORK}
    spans[BETWEEN] = subtract(active, union(span for parts in spans.values() for span in parts))
    parts = []
    for name, own in spans.items():
        within = intersect(own, active)
        hidden = length(intersect(within, busy))
        parts.append(HostPart(name, hidden, length(within) - hidden))
    return parts


def _load(event: HostEvent) -> Load:
    return Load(*(float(event.facts[name]) for name in Load._fields))
