"""Which operation a kernel is of, by the order in which a program runs them.

Within a CUDA graph, kernels have nothing but names. A kernel that XLA made is named as its operation, but for signs
and numbers: equal operations share one kernel. So the next operation of the name is meant. A library's kernel is of
an operation between those of the kernels around it. Invariant: where that leaves a choice of stages, as many kernels
as there are calls of libraries are theirs in order; otherwise nothing is said.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from jaxllm.profiling.hlo import Operation, Operations

_FARTHEST = 40
"""Operations between two kernels; more is another place of the program, or another call."""
_CALLS = "custom-call"


class ProgramOrder:
    """The operations of one program, in its order."""

    def __init__(self, operations: Operations):
        self._operations = list(operations.values())
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, (name, operation) in enumerate(operations.items()):
            self._places[without_numbers(operation.kernel or re.sub(r"[.-]", "_", name))].append(place)

    def follow(self, kernels: Sequence[str]) -> list[Operation | None]:
        """The operation of each kernel, by their names, in the order in which they ran."""
        places = self._named_places(kernels)
        found = [None if place is None else self._operations[place] for place in places]
        begin = 0
        while begin < len(kernels):
            end = begin
            while end < len(kernels) and places[end] is None:
                end += 1
            if end > begin:
                before = places[begin - 1] if begin else None
                found[begin:end] = self._between(before, places[end] if end < len(places) else None, end - begin)
            begin = end + 1
        return found

    def _named_places(self, kernels: Sequence[str]) -> list[int | None]:
        places: list[int | None] = []
        now = -1
        for kernel in kernels:
            own = self._places.get(without_numbers(kernel))
            if own is None:
                places.append(None)
            else:  # from the end on to the beginning: of the next call, or of a loop's next turn
                now = own[bisect_right(own, now) % len(own)]
                places.append(now)
        return places

    def _between(self, before: int | None, after: int | None, count: int) -> list[Operation | None]:
        unknown: list[Operation | None] = [None] * count
        if before is None or after is None or not 0 < after - before <= _FARTHEST:
            return unknown
        calls = [one for one in self._operations[before + 1 : after] if one.opcode == _CALLS]
        if len({one.stage for one in calls}) == 1:
            return [calls[0]] * count
        return list(calls) if len(calls) == count else unknown


def without_numbers(kernel: str) -> str:
    """What kernels of other layers have in common with "loop_add_fusion_12", "fusion.3" and "add_rms_norm__1"."""
    return re.sub(r"([._]+\d+)+$", "", kernel)
