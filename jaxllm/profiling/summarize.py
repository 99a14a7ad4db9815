"""From a trace and its session's facts to a summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxllm.profiling.attribution import Attributed, Programs
from jaxllm.profiling.ceilings import CEILINGS
from jaxllm.profiling.host_time import Call, find_calls, host_parts, in_flight, periods
from jaxllm.profiling.host_work import BETWEEN, HOST_WORK
from jaxllm.profiling.program_order import without_numbers
from jaxllm.profiling.session_facts import SessionFacts
from jaxllm.profiling.spans import Span, intersect, length, subtract, union
from jaxllm.profiling.stages import OTHER, PARTS, TOP_STAGES, layer_of, without_layer
from jaxllm.profiling.summary import BucketTime, Gap, HostTime, KernelTime, StageTime, Summary
from jaxllm.profiling.trace import Trace
from jaxllm.profiling.work import Load, Work, work_of

NUM_KERNELS, NUM_GAPS = 10, 5
SHORTEST_GAP_NS = 2000.0
"""Less is between any two kernels."""
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Session:
    """A trace whose events have owners."""

    facts: SessionFacts
    trace: Trace
    events: Sequence[Attributed]
    """Of the first device, by their starts."""
    calls: Sequence[Call]

    @classmethod
    def of(cls, trace: Trace, facts: SessionFacts) -> Session:
        """Finds out whose every event is."""
        first = min((lane.device for lane in trace.lanes), default=0)
        events = [event for lane in trace.lanes if lane.device == first for event in lane.events]
        return cls(facts, trace, Programs(facts.operations).attribute(events), find_calls(trace.host, facts.num_unread))

    @property
    def buckets(self) -> list[str]:
        """Those that were called."""
        return list(dict.fromkeys(call.bucket for call in self.calls))

    def events_of(self, bucket: str) -> list[Attributed]:
        program = self.facts.programs.get(bucket)
        return [one for one in self.events if one.program == program]


def summarize(session: Session) -> Summary:
    """Everything a session says.

    Raises:
        ValueError: it holds no step.
    """
    if not session.calls or not session.events:
        raise ValueError("the profile holds no step: let requests run while it is recorded")
    busy = union(one.event[:2] for one in session.events)
    launched = in_flight(session.calls, busy[-1][1])
    active = intersect(launched, [(busy[0][0], busy[-1][1])])
    idle = subtract(active, busy)
    steps = sum(call.load.steps for call in session.calls)
    host = host_parts(session.trace.host, active, busy)
    longest = sorted(idle, key=lambda span: span[0] - span[1])[:NUM_GAPS]
    return Summary(
        session.facts.described,
        CEILINGS.get(session.facts.device_kind),
        session.facts.unprofiled_step_ms,
        round(steps),
        sorted(_bucket_times(session, idle, launched), key=lambda bucket: -bucket.busy_ms * bucket.steps),
        _longest_kernels(session),
        [_describe_gap(span, session) for span in longest if length([span]) > SHORTEST_GAP_NS],
        _other_programs(session),
        [HostTime(part.name, part.hidden / steps / _NS_PER_MS, part.exposed / steps / _NS_PER_MS) for part in host],
    )


def _bucket_times(session: Session, idle: Sequence[Span], launched: Sequence[Span]) -> Iterable[BucketTime]:
    measured = periods(session.calls, launched)
    waited = _idle_by_program(session.events, idle)
    for bucket in session.buckets:
        loads = [call.load for call in session.calls if call.bucket == bucket]
        total = Load(*map(sum, zip(*loads, strict=True)))
        unit = total.steps * _NS_PER_MS
        events = session.events_of(bucket)
        idle_ms = waited.get(session.facts.programs.get(bucket, ""), 0.0) / unit
        busy_ms = sum(one.time for one in events) / unit
        time, steps = measured.get(bucket, (0.0, 0.0))
        yield BucketTime(
            bucket,
            len(loads),
            round(total.steps),
            total.per_step(),
            time / steps / _NS_PER_MS if steps else None,
            busy_ms,
            idle_ms,
            _stage_times(events, work_of(total.per_step(), session.facts.sizes), unit, busy_ms + idle_ms),
            _layer_times(events, unit),
        )


def _idle_by_program(events: Sequence[Attributed], idle: Sequence[Span]) -> dict[str, float]:
    """Nanoseconds of gaps, by the program whose event ended them."""
    waited: dict[str, float] = defaultdict(float)
    ended = iter(events)
    event = next(ended)
    for start, end in idle:
        while event.event.start < end:
            following = next(ended, None)
            if following is None:
                break
            event = following
        waited[event.program] += end - start
    return waited


def _stage_times(
    events: Sequence[Attributed], work: Mapping[str, Work], unit: float, step_ms: float
) -> list[StageTime]:
    times: dict[str, float] = defaultdict(float)
    for one in events:
        top, *parts = without_layer(one.stage).split("/")
        times[top] += one.time / unit
        if parts:
            times[f"{top}/{parts[0]}"] += one.time / unit
    names = [name for top in TOP_STAGES for name in (top, *(f"{top}/{part}" for part in PARTS.get(top, ())))]
    return [_stage_time(name, times[name], work.get(name), step_ms) for name in names if name in times]


def _stage_time(name: str, ms: float, work: Work | None, step_ms: float) -> StageTime:
    share = ms / step_ms if step_ms else 0.0
    if work is None or not ms:
        return StageTime(name, ms, share, None, None, None, None)
    gigabytes, gigaflops = work.num_bytes / 1e9, work.flops / 1e9
    # A gigabyte in a millisecond is a terabyte in a second.
    return StageTime(name, ms, share, gigabytes, gigaflops, gigabytes / ms, gigaflops / ms)


def _layer_times(events: Sequence[Attributed], unit: float) -> dict[str, list[float]]:
    times: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for one in events:
        layer = layer_of(one.stage)
        if layer is not None:
            times[without_layer(one.stage).split("/")[0]][layer] += one.time / unit
    return {stage: [found[layer] for layer in range(max(found) + 1)] for stage, found in sorted(times.items())}


def _longest_kernels(session: Session) -> list[KernelTime]:
    """Kernels of one name but for its numbers, and of one stage, are one."""
    steps: dict[str, float] = defaultdict(float)
    for call in session.calls:
        steps[call.bucket] += call.load.steps
    kernels = []
    for bucket in session.buckets:
        groups: dict[tuple[str, str], list[float]] = defaultdict(list)
        for one in session.events_of(bucket):
            groups[without_numbers(one.event.name), without_layer(one.stage)].append(one.time)
        for (name, stage), times in groups.items():
            ms = sum(times) / steps[bucket] / _NS_PER_MS
            kernels.append(
                KernelTime(name, stage, bucket, ms, len(times) / steps[bucket], sum(times) / len(times) / 1e3)
            )
    return sorted(kernels, key=lambda kernel: -kernel.ms * steps[kernel.bucket])[:NUM_KERNELS]


def _other_programs(session: Session) -> dict[str, float]:
    """Milliseconds in all of what ran besides the steps."""
    own = {session.facts.programs.get(bucket) for bucket in session.buckets}
    times: dict[str, float] = defaultdict(float)
    for one in session.events:
        if one.program not in own:
            times[one.program or one.event.name] += one.time / _NS_PER_MS
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _describe_gap(gap: Span, session: Session) -> Gap:
    before = [one for one in session.events if one.event.end <= gap[0]]
    after = [one for one in session.events if one.event.start >= gap[1]]
    spent: dict[str, float] = defaultdict(float)
    for event in session.trace.host:
        if event.name in HOST_WORK:
            spent[event.name] += length(intersect([event[:2]], [gap]))
    spent[BETWEEN] = length([gap]) - sum(spent.values())
    return Gap(
        length([gap]) / 1e3,
        before[-1].stage if before else OTHER,
        after[0].stage if after else OTHER,
        max(spent, key=lambda name: spent[name]),
    )
