"""A summary as tables: the same ones in a terminal, in a file and on the page of the timeline.

Invariant: every cell is text that is ready to be read. Whoever shows a table only lays it out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxllm.profiling.ceilings import Ceiling
from jaxllm.profiling.host_work import READ
from jaxllm.profiling.summary import BucketTime, StageTime, Summary

UNKNOWN = "unknown"
_KERNEL_WIDTH = 64


@dataclass(frozen=True)
class Table:
    """Rows of equal length. The first column is a name, the others are numbers unless they are `texts`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: frozenset[str] = frozenset()
    """Columns of text besides the first."""

    def is_text(self, column: int) -> bool:
        return column == 0 or self.columns[column] in self.texts


def make_tables(summary: Summary) -> list[Table]:
    """All of a summary, most important first."""
    stages = [_stages(bucket, summary.ceiling) for bucket in summary.buckets]
    tables = [_session(summary), _steps(summary), *stages, _kernels(summary), _host(summary)]
    return tables + [_gaps(summary)] * bool(summary.gaps) + [_others(summary)] * bool(summary.others)


def to_text(tables: Sequence[Table]) -> str:
    """For where nothing else lays out tables."""
    return "\n\n".join("\n".join(_lines(table)) for table in tables) + "\n"


def _lines(table: Table) -> Iterator[str]:
    yield table.title
    cells = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = (
            cell.ljust(width) if table.is_text(index) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(aligned).rstrip()


def _session(summary: Summary) -> Table:
    ceiling = summary.ceiling
    ceilings = f"{ceiling.read:g} TB/s, {ceiling.compute:g} TFLOP/s" if ceiling else f"{UNKNOWN}: not measured"
    rows = [(name, str(value)) for name, value in summary.facts.items()]
    rows += [("ceilings of a device", ceilings), ("steps", str(summary.steps))]
    return Table("Session", ("", "value"), rows, frozenset({"value"}))


def _steps(summary: Summary) -> Table:
    """The unprofiled time is of the bucket that took longest: the one that somebody measured."""
    unprofiled = [summary.unprofiled_step_ms, *itertools.repeat(None, len(summary.buckets) - 1)]
    rows = [
        (
            bucket.name,
            str(bucket.steps),
            f"{bucket.load.rows:.4g}",
            f"{bucket.load.tokens:.4g}",
            f"{bucket.load.contexts / bucket.load.rows:.0f}",
            _ms(time),
            _ms(bucket.step_ms),
            _ms(bucket.busy_ms),
            _ms(bucket.idle_ms),
            "" if bucket.accounted is None else f"{bucket.accounted:.1%}",
        )
        for bucket, time in zip(summary.buckets, unprofiled, strict=True)
    ]
    columns = ("bucket", "steps", "rows", "tokens", "context", "unprofiled ms", "profiled ms")
    return Table("Steps", (*columns, "stages ms", "idle ms", "stages + idle"), rows)


def _stages(bucket: BucketTime, ceiling: Ceiling | None) -> Table:
    rows = [_stage_row(stage, ceiling) for stage in bucket.stages]
    step_ms = bucket.busy_ms + bucket.idle_ms
    rows.append(("idle", _ms(bucket.idle_ms), f"{bucket.idle_ms / step_ms:.1%}" if step_ms else "", "", "", "", ""))
    columns = ("stage", "ms", "share", "TB/s", "of ceiling", "TFLOP/s", "of its ceiling")
    return Table(f"Stages of a step, {bucket.name}", columns, rows)


def _stage_row(stage: StageTime, ceiling: Ceiling | None) -> tuple[str, ...]:
    top, _, part = stage.name.partition("/")
    return (
        f"  {part}" if part else top,
        _ms(stage.ms),
        f"{stage.share:.1%}",
        *_speed(stage.tb_per_s, ceiling.read if ceiling else None),
        *_speed(stage.tflop_per_s, ceiling.compute if ceiling else None),
    )


def _speed(speed: float | None, most: float | None) -> tuple[str, str]:
    if not speed:
        return "", ""
    return f"{speed:,.0f}" if speed >= 1000 else f"{speed:.3g}", UNKNOWN if most is None else f"{speed / most:.0%}"


def _kernels(summary: Summary) -> Table:
    rows = [
        (
            kernel.name if len(kernel.name) <= _KERNEL_WIDTH else kernel.name[: _KERNEL_WIDTH - 1] + "…",
            kernel.stage,
            kernel.bucket,
            _ms(kernel.ms),
            f"{kernel.count:.4g}",
            f"{kernel.us_each:.2f}",
        )
        for kernel in summary.kernels
    ]
    columns = ("kernel", "stage", "bucket", "ms a step", "times a step", "us each")
    return Table("The longest kernels", columns, rows, frozenset({"stage", "bucket"}))


def _host(summary: Summary) -> Table:
    rows = [
        (part.name + (" (waits)" if part.name == READ else ""), _ms(part.hidden_ms), _ms(part.exposed_ms))
        for part in summary.host
    ]
    hidden, exposed = summary.host_ms
    rows.append(("the host's own work", _ms(hidden), _ms(exposed)))
    return Table("The host in a step", ("work", "hidden ms", "not hidden ms"), rows)


def _gaps(summary: Summary) -> Table:
    rows = [(f"{gap.us:.1f} us", gap.after, gap.before, gap.host) for gap in summary.gaps]
    columns = ("the longest idle gaps", "after", "before", "the host meanwhile")
    return Table("Idle", columns, rows, frozenset(columns))


def _others(summary: Summary) -> Table:
    rows = [(name, _ms(ms)) for name, ms in summary.others.items()]
    return Table("Programs besides the steps", ("program", "ms in all"), rows)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
