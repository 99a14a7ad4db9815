"""`jaxllm bench`: measures, shows each figure as a table row, and writes them as JSON.

The invariant: with `--json -`, standard output holds the JSON only. A figure of a wrong result is written and shown,
and then the command fails.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxllm.bench import runs
from jaxllm.bench.report import Figure, Report, show_number
from jaxllm.serving.cli_commands import (
    Bench,
    BenchAll,
    BenchKernels,
    BenchLatency,
    BenchServe,
    BenchStartup,
    BenchThroughput,
    EngineFlags,
)
from jaxllm.serving.cli_flags import get_fields
from jaxllm.serving.cli_output import check_writable

STANDARD_OUTPUT = "-"
_WIDTH_OF_FILES = 200
"""In characters, where nothing says how wide a line may be: rows stay whole for other programs."""


def run(command: Bench) -> None:
    benchmark = command.benchmark
    if benchmark.json not in (None, STANDARD_OUTPUT):
        check_writable(benchmark.json, "json")
    report = _RUNNERS[type(benchmark)](benchmark)
    _show(report, Console(stderr=benchmark.json == STANDARD_OUTPUT, highlight=False))
    if benchmark.json == STANDARD_OUTPUT:
        print(report.to_json(), end="")
    elif benchmark.json is not None:
        report.write(Path(benchmark.json))
    if wrong := [figure.name for figure in report.figures if figure.is_wrong]:
        raise RuntimeError(f"what was timed gives wrong results: {'; '.join(wrong)}")


def _fields(flags: EngineFlags) -> dict[str, Any]:
    return get_fields(flags.make_config())


def _latency(command: BenchLatency) -> Report:
    return runs.report_latency(_fields(command.engine), command.latency.make_settings())


def _throughput(command: BenchThroughput) -> Report:
    return runs.report_throughput(_fields(command.engine), command.throughput.make_settings())


def _startup(command: BenchStartup) -> Report:
    return runs.report_startup(_fields(command.engine), command.startup.make_settings())


def _kernels(command: BenchKernels) -> Report:
    return runs.report_kernels(command.kernels)


def _all(command: BenchAll) -> Report:
    return runs.report_all(_fields(command.engine), command.latency.make_settings(), command.throughput.make_settings())


def _serve(command: BenchServe) -> Report:
    # Both need packages that no other benchmark does: a missing one is known before anything is measured.
    plot = importlib.import_module("jaxllm.bench.plot").plot_serve if command.plot is not None else None
    if command.plot is not None:
        check_writable(command.plot, "plot")
    report = importlib.import_module("jaxllm.bench.serve").report_serve(command.url, command.load.make_settings())
    if command.plot is not None and plot is not None:
        plot(report, Path(command.plot))
    return report


_RUNNERS: Mapping[type, Callable[[Any], Report]] = {
    BenchLatency: _latency,
    BenchThroughput: _throughput,
    BenchStartup: _startup,
    BenchKernels: _kernels,
    BenchAll: _all,
    BenchServe: _serve,
}


def _show(report: Report, console: Console) -> None:
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    machine = report.machine
    title = f"{report.model or report.benchmark} on {machine['count']} x {machine['device']}, jax {machine['jax']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False)
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("details", overflow="fold", style="dim")
    for figure in report.figures:
        table.add_row(*_make_row(figure))
    console.print(table)


def _make_row(figure: Figure) -> tuple[Text, str, str, Text]:
    details = ", ".join(f"{name} {show_number(value)}" for name, value in figure.details.items())
    style = "bold red" if figure.is_wrong else ""
    return Text(figure.name, style), show_number(figure.value), figure.unit, Text(details)
