"""Draws what simulate_policies.py found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

POLICIES = ("fcfs", "sjf", "sjf without ageing", "priority", "dynamic")
KINDS = {"mean": "all, mean", "p99.9": "all, 99.9 %", "urgent_mean": "urgent tenth, mean"}


def draw(figures: dict[str, Any], path: Path) -> None:
    """Three charts: latencies by policy, what ageing trades, and seats in use by kind of batching."""
    figure = Figure(figsize=(16, 4.8), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    _draw_policies(first, figures["policies"]["1.5"])
    _draw_ageing(second, figures["ageing"])
    _draw_batching(third, figures["batching"])
    figure.savefig(path, dpi=110)


def _draw_policies(axes: Axes, policies: dict[str, dict[str, float]]) -> None:
    for index, (kind, label) in enumerate(KINDS.items()):
        places = [place + 0.27 * (index - 1) for place in range(len(POLICIES))]
        bars = axes.bar(places, [policies[name][kind] for name in POLICIES], 0.25, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(POLICIES)), [name.replace(" without", "\nwithout") for name in POLICIES])
    axes.set(title="Latency at 1.5 times capacity", ylabel="seconds")
    axes.legend()


def _draw_ageing(axes: Axes, curve: list[dict[str, float]]) -> None:
    for kind in ("mean", "p99.9"):
        axes.plot(range(len(curve)), [point[kind] for point in curve], marker="o", label=KINDS[kind])
    axes.set_xticks(range(len(curve)), [f"{point['seconds_per_token']:g}" for point in curve])
    axes.set(title="sjf: what ageing trades", xlabel="seconds_per_token (0: first come, first served)")
    axes.set(ylabel="seconds", ylim=(0, None))
    axes.legend()


def _draw_batching(axes: Axes, batching: dict[str, Any]) -> None:
    for name, series in batching["seats_in_use"].items():
        rate, share = batching[name]["output_tokens_per_second"], batching[name]["busy_share"]
        label = f"{name}: {rate:,.0f} tokens/s, {share:.0%} of seats busy"
        axes.plot([when for when, _ in series], [count for _, count in series], label=label)
    axes.set(title="The same requests, all there at 0 s", xlabel="seconds", ylabel="seats in use", ylim=(0, 165))
    axes.legend(loc="upper right")
