"""A picture of what `jaxllm bench serve` measured: speed against load, and what the load costs in latency.

Invariant: it shows figures of the report and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from jaxllm.bench.report import Figure, Report

_LATENCIES = ("TTFT", "TPOT", "ITL", "E2E")
_SHARES = ("p50_ms", "p90_ms", "p99_ms")


def plot_serve(report: Report, path: Path) -> None:
    """Writes a picture, of the kind that the file's name ends in (.png, .svg, .pdf).

    Raises:
        ValueError: there is no such kind.
    """
    outputs = [figure for figure in report.figures if figure.name.endswith(": output")]
    is_rate = "request_rate" in outputs[0].details
    loads = [float(figure.details["request_rate" if is_rate else "concurrency"]) for figure in outputs]
    label = "requests per second" if is_rate else "requests in flight"
    picture = Picture(figsize=(15, 3), layout="constrained")
    speed, *others = picture.subplots(1, 1 + len(_LATENCIES))
    speed.plot(loads, [figure.value for figure in outputs], marker="o")
    _name_axes(speed, "output tokens per second", label)
    for axes, name in zip(others, _LATENCIES, strict=True):
        _plot_latency(axes, loads, [figure for figure in report.figures if figure.name.endswith(f": {name}")])
        _name_axes(axes, f"{name}, ms", label)
    picture.suptitle(f"{report.model}, {report.date}")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path)


def _plot_latency(axes: Axes, loads: list[float], figures: list[Figure]) -> None:
    for share in _SHARES:
        values = [float(figure.details[share]) for figure in figures]
        axes.plot(loads, values, marker="o", label=share.removesuffix("_ms"))
    axes.legend()


def _name_axes(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.set_ylim(bottom=0)
