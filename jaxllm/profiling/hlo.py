"""Which stage every operation of a compiled program belongs to, read off the program's text.

A trace names the operation that a kernel comes from; only the program knows its scopes. Invariant: an operation
without scopes of its own, as many fusions are, has the stage of most of what was fused into it; failing this, that of
the loop it is in, or of the operations around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxllm.profiling.scopeless import infer_stages
from jaxllm.profiling.stages import is_whole, most_common, stage_of

CONTROL_FLOW = frozenset({"while", "conditional", "call"})
"""Opcodes of operations whose time is that of others."""
_WITHOUT_OPERANDS = frozenset({"parameter", "constant"})
_NEVER_RUN = _WITHOUT_OPERANDS | {"tuple", "get-tuple-element", "bitcast"}

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = .*? ([a-z][a-z0-9-]*)\(")
_KERNEL = re.compile(r'\bgrid_z = .*\bname = "(\w+)"')
"""Of a call of a Pallas kernel."""
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NAME = re.compile(r"[\w.-]+")
_FUSED = re.compile(r"\bcalls=%?([\w.-]+)")
_CALLED = re.compile(r"\b(?:to_apply|body|condition|(?:true|false)_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


class Operation(NamedTuple):
    """One that may run."""

    opcode: str
    stage: str | None
    kernel: str = ""
    """Its kernel's name, where that is not made of the operation's."""


type Operations = Mapping[str, Operation]
"""By their names in the program."""


class _Line(NamedTuple):
    name: str
    opcode: str
    stage: str | None
    """Of its own scopes."""
    fused: str | None
    """The computation that it is, if it is a fusion."""
    called: tuple[str, ...]
    """Computations that it runs."""
    kernel: str
    arguments: str
    """The operation's operands, and perhaps more."""


def read_operations(text: str) -> dict[str, Operation]:
    """The operations of a program as `jax.stages.Compiled.as_text` prints it."""
    computations = dict(_computations(text))
    fused = {line.fused for lines in computations.values() for line in lines}
    run = {name: lines for name, lines in computations.items() if name not in fused}
    stages = {line.name: _stage(line, computations) for lines in run.values() for line in lines}
    _pass_on(stages, run)
    return {
        line.name: Operation(line.opcode, stages[line.name], line.kernel)
        for lines in run.values()
        for line in lines
        if line.opcode not in _NEVER_RUN
    }


def _computations(text: str) -> Iterator[tuple[str, list[_Line]]]:
    lines: list[_Line] = []
    for text_line in text.splitlines():
        if not text_line.startswith(" "):
            if match := _COMPUTATION.match(text_line):
                lines = []
                yield match[1], lines
        elif match := _INSTRUCTION.match(text_line):
            lines.append(_read_line(match, text_line))


def _read_line(match: re.Match[str], text: str) -> _Line:
    name, opcode = match.groups()
    op_name, fused, branches = _OP_NAME.search(text), _FUSED.search(text), _BRANCHES.search(text)
    kernel = _KERNEL.search(text)
    called = _CALLED.findall(text)
    if branches:
        called += [branch.strip().removeprefix("%") for branch in branches[1].split(",")]
    return _Line(
        name,
        opcode,
        stage_of(op_name[1]) if op_name else None,
        fused[1] if fused else None,
        tuple(called),
        kernel[1] if kernel else "",
        "" if opcode in _WITHOUT_OPERANDS else text[match.end() :].partition("), ")[0],
    )


def _stage(line: _Line, computations: Mapping[str, list[_Line]]) -> str | None:
    if is_whole(line.stage) or line.fused is None:
        return line.stage
    return most_common(inner.stage for inner in computations.get(line.fused, ())) or line.stage


def _pass_on(stages: dict[str, str | None], computations: Mapping[str, list[_Line]]) -> None:
    """What has no stage has that of the loop or branch it is in, or of what is around it.

    XLA prints callees before their callers.
    """
    for lines in reversed(list(computations.values())):
        infer_stages(_operands(lines), stages)
        for line in lines:
            for inner in (one for name in line.called for one in computations.get(name, ())):
                stages[inner.name] = stages[inner.name] or stages[line.name]


def _operands(lines: Sequence[_Line]) -> dict[str, list[str]]:
    """Of each operation, those of the same computation."""
    names = {line.name for line in lines}
    return {line.name: [name for name in _NAME.findall(line.arguments) if name in names] for line in lines}
