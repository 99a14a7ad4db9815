"""A benchmark's figures, and the JSON that is kept of them.

Invariant: a report says what is needed to judge a figure and to measure it again: machine, versions, date,
command, commit, parameters. What scripts/bench_table.py reads is the `Figure`s.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxllm.bench.host import command_line, cpu_model, git_commit, gpu_driver

type Detail = float | int | str | bool


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    """What was measured, with the sizes that matter; the same measurement has the same name every time."""
    value: float
    unit: str
    details: Mapping[str, Detail] = field(default_factory=dict)
    """What goes with it, by name; see `is_wrong`."""

    @property
    def is_wrong(self) -> bool:
        """The result that was timed is not correct, which makes the time worthless."""
        return self.details.get("correct") is False


@dataclass(frozen=True)
class Report:
    """The figures of one run on one machine."""

    benchmark: str
    """The subcommand: "latency", "all"."""
    model: str | None
    """As it was named; None where no model is involved."""
    machine: Mapping[str, Any]
    """See `describe_machine`."""
    parameters: Mapping[str, Any]
    figures: Sequence[Figure]
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    command: str = field(default_factory=command_line)
    commit: str | None = field(default_factory=git_commit)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")


def describe_machine(devices: Iterable[Any]) -> dict[str, Any]:
    """The machine and its software, where these JAX devices were used."""
    devices = list(devices)
    return {
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "count": len(devices),
        "driver": gpu_driver() if devices[0].platform == "gpu" else None,
        "cpu": cpu_model(),
        "jax": jax.__version__,
        "jaxllm": own_version(),
    }


def own_version() -> str | None:
    """Of jaxllm."""
    try:
        return metadata.version("jaxllm")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return None


def round_to(value: float, digits: int = 4) -> float:
    """Significant digits: more of them would be noise."""
    return float(f"{value:.{digits}g}")


def show_number(value: Detail) -> str:
    """A figure or a detail as text."""
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
