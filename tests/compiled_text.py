"""Reads what XLA writes about a compiled program: its launches, and its copies of large arrays."""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod
from typing import NamedTuple

GRAPH, WHILE, COPY = "kCommandBuffer", "kWhile", "kCopy"
_THUNK = re.compile(r"^( *)\d+: (k\w+) *\[[^]]*\] *(\S*)")
_SECTION = re.compile(r"(condition|body|branch_\d+):\s*$")
_COPY = re.compile(r"= (.*?) copy(?:-start)?\(")
_DIMENSIONS = re.compile(r"\w+\[([\d,]*)\]")


class Launches(NamedTuple):
    """What a program does, from its `thunk_sequence_after_thunk_passes`, in order."""

    num_graphs: int
    """Command buffers: CUDA graphs."""
    in_graphs: list[str]
    """Kernels and other work in them."""
    outside: list[str]
    """The same outside of them; the conditions of loops are left out."""


def read_launches(text: str) -> Launches:
    found = Launches(0, [], [])
    parents: list[tuple[int, str]] = []
    section = ""
    for line in text.splitlines():
        if match := _SECTION.search(line):
            section = match[1]
        if not (match := _THUNK.match(line)):
            continue
        depth, kind, name = len(match[1]), match[2], match[3]
        section = section if depth else ""
        parents = [parent for parent in parents if parent[0] < depth]
        in_graph = GRAPH in (parent[1] for parent in parents)
        parents.append((depth, kind))
        if kind == GRAPH:
            found = found._replace(num_graphs=found.num_graphs + 1)
        elif in_graph:
            found.in_graphs.append(name or kind)
        elif section != "condition":
            found.outside.append(name or kind)
    return found


def distances(names: list[str], prefix: str) -> list[int]:
    """How far each name with this prefix is behind the one before it."""
    places = [place for place, name in enumerate(names) if name.startswith(prefix)]
    return [after - before for before, after in pairwise(places)]


def large_copies(hlo: str, num_elements: int) -> list[str]:
    """The types of what is copied and has at least so many elements."""
    types = (match[1] for match in _COPY.finditer(hlo))
    return [each for each in types if max(map(_size, _DIMENSIONS.findall(each)), default=0) >= num_elements]


def _size(dimensions: str) -> int:
    return prod(map(int, dimensions.split(","))) if dimensions else 1
