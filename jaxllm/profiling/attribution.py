"""Whose every event of a device is: which program ran it, and which stage of it.

A trace says it in one of four ways, and each is tried where the one before fails: the operation's name, which the
program's text has a stage for; the operation's scopes; the order of kernels, which is all there is within a CUDA
graph; the neighbours, where both are of one stage. Invariant: what cannot be told is `OTHER`, never a guess between
two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxllm.profiling.hlo import CONTROL_FLOW, Operation, Operations
from jaxllm.profiling.program_order import ProgramOrder
from jaxllm.profiling.spans import shares
from jaxllm.profiling.stages import OTHER, is_whole, stage_of
from jaxllm.profiling.trace import DeviceEvent

_LOOPS = re.compile(r"(while|conditional|cond|call)(\.\d+)?$")
"""Names of control flow in programs that are not ours."""
_COPY = re.compile("Memcpy|Memset", re.IGNORECASE)


@dataclass(frozen=True)
class Attributed:
    """An event, and whose it is."""

    event: DeviceEvent
    program: str
    """Its name in the trace; "" if nothing says it."""
    stage: str
    time: float
    """Nanoseconds that it has for itself; see `shares`."""


class Programs:
    """The programs that a session's steps ran.

    Args:
        operations: of each program, by its name in the trace.
    """

    def __init__(self, operations: Mapping[str, Operations]):
        self._operations = operations

    def attribute(self, events: Sequence[DeviceEvent]) -> list[Attributed]:
        """The events of one device; they are returned in the order of their starts."""
        events = sorted(events)
        programs = self._fill_programs([event.module for event in events])
        found = [self._find(event, program) for event, program in zip(events, programs, strict=True)]
        self._find_by_order(events, programs, found)
        stages = _fill_stages([_known_stage(event, one) for event, one in zip(events, found, strict=True)])
        times = shares(
            [event[:2] for event in events], [_is_container(*pair) for pair in zip(events, found, strict=True)]
        )
        return [Attributed(*parts) for parts in zip(events, programs, stages, times, strict=True)]

    def _fill_programs(self, modules: list[str]) -> list[str]:
        """Copies of a step's input and result belong to no program: they come before and after it."""
        filled = next(iter(self._operations)) if len(self._operations) == 1 else ""
        if not any(modules):
            return [filled] * len(modules)
        programs = []
        for module in reversed(modules):
            filled = module or filled
            programs.append(filled)
        return programs[::-1]

    def _find(self, event: DeviceEvent, program: str) -> Operation | None:
        operations = self._operations.get(program, {})
        named = [operations[name] for name in event.operation.split("::") if name in operations]
        return next((one for one in named if one.opcode not in CONTROL_FLOW), named[0] if named else None)

    def _find_by_order(
        self, events: Sequence[DeviceEvent], programs: Sequence[str], found: list[Operation | None]
    ) -> None:
        """Fills in operations of kernels that name none. Copies between host and device are no operation."""
        for program, operations in self._operations.items():
            places = [
                place
                for place, event in enumerate(events)
                if programs[place] == program and not (event.operation or event.scope or _COPY.match(event.name))
            ]
            order = ProgramOrder(operations).follow([events[place].name for place in places])
            for place, operation in zip(places, order, strict=True):
                found[place] = operation


def _known_stage(event: DeviceEvent, operation: Operation | None) -> str | None:
    stages = (operation.stage if operation else None, stage_of(event.scope))
    return next((stage for stage in stages if is_whole(stage)), None)


def _is_container(event: DeviceEvent, operation: Operation | None) -> bool:
    return operation.opcode in CONTROL_FLOW if operation else bool(_LOOPS.match(event.operation))


def _fill_stages(stages: list[str | None]) -> list[str]:
    """What lies between two events of one stage is of that stage, too."""
    after: list[str | None] = []
    following = None
    for stage in reversed(stages):
        after.append(following)
        following = stage or following
    filled: list[str] = []
    before = None
    for stage, following in zip(stages, reversed(after), strict=True):
        filled.append(stage or (before if before and before == following else OTHER))
        before = stage or before
    return filled
