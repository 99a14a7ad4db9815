"""What a profiler session recorded: the operations of devices, and what the host did meanwhile.

Read from JAX's own file with JAX's own reader. Invariant: nothing here knows a model. All times are nanoseconds of
one clock, and lie before the session's end.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxllm.profiling.host_work import HOST_WORK, SETTLED, STEP

XPLANE_FILES = "*.xplane.pb"
_GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
_CPU_PLANE = "/host:CPU"
_ANNOTATIONS = frozenset({STEP, SETTLED, *HOST_WORK})
_GRAPH = "command_buffer"
"""What XLA names in place of the operation of a kernel in a CUDA graph."""
_STREAM = "Stream"
"""How XLA names the lines of kernels and copies; others of a GPU's lines repeat them in another order."""


class DeviceEvent(NamedTuple):
    """A kernel or a copy on a GPU; an operation on a CPU."""

    start: float
    end: float
    name: str
    """Of the kernel."""
    module: str
    """The program it belongs to, "" if the trace does not say."""
    operation: str
    """The program's operation, or "" likewise, as for what runs in a CUDA graph; several, as a loop's and its body's,
    have "::" between them."""
    scope: str
    """The operation's `op_name`, or its end, if the trace says it."""


class HostEvent(NamedTuple):
    """A stretch of the host's work: one of `HOST_WORK`, or a step."""

    start: float
    end: float
    name: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Lane:
    """A stream of a GPU, or a thread of a CPU."""

    device: int
    name: str
    events: tuple[DeviceEvent, ...]
    """By their starts."""


@dataclass(frozen=True)
class Trace:
    """One session."""

    lanes: tuple[Lane, ...]
    host: tuple[HostEvent, ...]
    """By their starts; of the thread that runs the steps."""


def read_trace(folder: Path) -> Trace:
    """The session in `folder`, as JAX wrote it.

    Raises:
        ValueError: there is none.
    """
    files = sorted(folder.glob(XPLANE_FILES))
    if not files:
        raise ValueError(
            f"{folder} holds no profile ({XPLANE_FILES}): name the folder of a session, as in FOLDER/plugins/profile/DATE"
        )
    with warnings.catch_warnings():
        # jaxlib's iterators lack the name of their module; Python says so once a class.
        warnings.filterwarnings("ignore", ".*has no __module__ attribute", DeprecationWarning)
        return make_trace(jax.profiler.ProfileData.from_file(str(files[0])).planes)


def make_trace(planes: Any) -> Trace:
    """From the planes of a `jax.profiler.ProfileData`, or objects like them."""
    lanes: list[Lane] = []
    host: list[HostEvent] = []
    for plane in planes:
        if match := _GPU_PLANE.search(plane.name):
            lanes += [
                Lane(int(match[1]), line.name, _sorted(_device_event(event) for event in line.events))
                for line in plane.lines
                if line.name.startswith(_STREAM)
            ]
        elif plane.name == _CPU_PLANE:
            for line in plane.lines:
                operations, annotations = _of_thread(line)
                lanes += [Lane(device, line.name, _sorted(events)) for device, events in sorted(operations.items())]
                host += annotations
    return _cut(lanes, host)


def _cut(lanes: list[Lane], host: list[HostEvent]) -> Trace:
    """What began before the session's end; all, if nothing marks it."""
    end = min((event.start for event in host if event.name == SETTLED), default=math.inf)
    cut = [Lane(lane.device, lane.name, tuple(event for event in lane.events if event.start < end)) for lane in lanes]
    before = sorted((event for event in host if event.start < end), key=lambda event: event.start)
    return Trace(tuple(lane for lane in cut if lane.events), tuple(before))


def _of_thread(line: Any) -> tuple[dict[int, list[DeviceEvent]], list[HostEvent]]:
    """The operations that a thread computed, by their devices, and our annotations on it."""
    operations: dict[int, list[DeviceEvent]] = {}
    annotations: list[HostEvent] = []
    for event in line.events:
        if event.name in _ANNOTATIONS:
            annotations.append(HostEvent(event.start_ns, event.end_ns, event.name, dict(event.stats)))
        elif event.duration_ns > 0 and "hlo_op" in (stats := dict(event.stats)):
            operations.setdefault(stats.get("device_ordinal", 0), []).append(_device_event(event, stats))
    return operations, annotations


def _device_event(event: Any, stats: Mapping[str, Any] | None = None) -> DeviceEvent:
    facts = dict(event.stats) if stats is None else stats
    module, operation, scope = (str(facts.get(key, "")) for key in ("hlo_module", "hlo_op", "name"))
    if operation.startswith(_GRAPH):
        operation = ""
    return DeviceEvent(event.start_ns, event.end_ns, event.name, module, operation, scope)


def _sorted(events: Iterator[DeviceEvent] | list[DeviceEvent]) -> tuple[DeviceEvent, ...]:
    return tuple(sorted(event for event in events if event.end > event.start))
