"""Simulates scheduling policies, and continuous against static batching; writes the figures and a plot of them.

    .venv/bin/python scripts/simulate_policies.py [--folder benchmarks/policies]

The scheduler is the engine's; the device is a clock (see policy_simulation.py). Every run of a seed has the same
requests. Nothing depends on the machine that this runs on: the same code gives the same figures. A few minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import policy_simulation as sim
from policy_plot import draw

from jaxllm.config import PreemptionVictim
from jaxllm.scheduling.dynamic_order import DynamicOrder
from jaxllm.scheduling.policy import FCFS, AdmissionOrder, PriorityOrder
from jaxllm.scheduling.policy_choice import POLICIES, VICTIMS, make_victims
from jaxllm.scheduling.shortest_first import PROMPT_SHARE, ShortestFirst

ROOT = Path(__file__).resolve().parent.parent
LOADS = (0.9, 1.5)
OVERLOAD = LOADS[-1]
AGEING = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 1.0)
"""Seconds of waiting that make up for a token; 0 is first come, first served."""
NO_AGEING = 1e6
ORDERS: dict[str, Callable[[], AdmissionOrder]] = {
    "fcfs": FCFS,
    "sjf": ShortestFirst,
    "sjf without ageing": lambda: ShortestFirst(NO_AGEING),
    "priority": PriorityOrder,
    "dynamic": DynamicOrder,
}
MACHINE = sim.Machine(seats=128, blocks=6000)
"""As many blocks as the seats fill: 96,000 tokens, 12.6 GB."""
SCARCE = sim.Machine(seats=256, blocks=3300)
"""A third of the blocks that the seats could fill."""
WORKLOAD = sim.Workload()
LARGEST_COST = sim.MAX_TOKENS + PROMPT_SHARE * (sim.MAX_MODEL_LEN - sim.MAX_TOKENS)
"""That a request has under sjf. Times `seconds_per_token`: for how long others may come that are served before it."""


@dataclass(frozen=True)
class Study:
    """What is simulated, and how much of it."""

    machine: sim.Machine = MACHINE
    scarce: sim.Machine = SCARCE
    workload: sim.Workload = WORKLOAD
    count: int = 4000
    seeds: Sequence[int] = (0, 1, 2)

    def run(self, order: AdmissionOrder, rate: float, seed: int, victims: PreemptionVictim | None = None) -> sim.Result:
        return self._run(self.machine, order, rate, seed, victims)

    def run_scarce(
        self, order: AdmissionOrder, rate: float, seed: int, victims: PreemptionVictim | None = None
    ) -> sim.Result:
        return self._run(self.scarce, order, rate, seed, victims)

    def run_saturated(self, machine: sim.Machine, seed: int, join: sim.Join = sim.as_they_come) -> sim.Result:
        """All requests are there from the beginning."""
        return sim.simulate(self.workload.make(self.count // 2, 0, seed), machine.make_scheduler(FCFS()), join)

    def _run(
        self, machine: sim.Machine, order: AdmissionOrder, rate: float, seed: int, victims: PreemptionVictim | None
    ) -> sim.Result:
        jobs = self.workload.make(self.count, rate, seed)
        return sim.simulate(jobs, machine.make_scheduler(order, make_victims(victims, order)))


def get_capacity(result: sim.Result) -> float:
    """Requests a second that a machine serves while enough wait: neither when it fills up, nor when it runs empty."""
    ends = sorted(job.finished or 0.0 for job in result.jobs)
    first, last = len(ends) // 5, len(ends) * 4 // 5
    return (last - first) / (ends[last] - ends[first])


def summarize(result: sim.Result, seats: int) -> dict[str, float]:
    """Latencies in seconds from arrival to last token."""
    urgent = [job for job in result.jobs if job.priority == 0]
    first_tokens = [(job.first_token or 0.0) - job.arrival for job in urgent]
    figures = {
        "mean": result.mean(),
        "p50": result.percentile(50),
        "p99": result.percentile(99),
        "p99.9": result.percentile(99.9),
        "urgent_mean": result.mean(lambda job: job.priority == 0),
        "urgent_first_token": statistics.fmean(first_tokens),
        "others_mean": result.mean(lambda job: job.priority != 0),
        "output_tokens_per_second": result.output_rate,
        "busy_share": result.busy_seats / result.seconds / seats,
        "preemptions_per_request": result.num_preemptions / len(result.jobs),
        "recomputed_share": result.recomputed_share,
    }
    return {name: round(value, 5) for name, value in figures.items()}


def mean_of(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over the seeds."""
    return {name: round(statistics.fmean(one[name] for one in figures), 5) for name in figures[0]}


def compare_batching(study: Study) -> dict[str, Any]:
    """Continuous against static batching, in the same memory; and both where memory does not matter."""
    roomy = sim.Machine(study.machine.seats, study.machine.seats * sim.MAX_MODEL_LEN // study.machine.block_size)
    figures = _compare_batching(study, study.machine)
    figures["ratio_with_room_for_all"] = _compare_batching(study, roomy)["ratio"]
    return figures


def _compare_batching(study: Study, machine: sim.Machine) -> dict[str, Any]:
    runs: dict[str, sim.Join] = {"continuous": sim.as_they_come, "static": functools.partial(sim.in_batches, machine)}
    results = {name: study.run_saturated(machine, study.seeds[0], join) for name, join in runs.items()}
    figures: dict[str, Any] = {name: summarize(one, machine.seats) for name, one in results.items()}
    rates = [figures[name]["output_tokens_per_second"] for name in runs]
    figures["ratio"] = round(rates[0] / rates[1], 2)
    figures["seats_in_use"] = {name: _thin(one.seats_in_use) for name, one in results.items()}
    return figures


def compare_policies(study: Study, capacity: float) -> dict[str, dict[str, Any]]:
    """Every policy at every load: the average over the seeds, and each."""
    compared: dict[str, dict[str, Any]] = {}
    for load in LOADS:
        for name, make in ORDERS.items():
            runs = [study.run(make(), load * capacity, seed) for seed in study.seeds]
            figures = [summarize(run, study.machine.seats) for run in runs]
            compared.setdefault(str(load), {})[name] = mean_of(figures) | {"seeds": figures}
    return compared


def compare_ageing(study: Study, capacity: float) -> list[dict[str, float]]:
    """sjf at overload, from first come, first served to hardly any ageing."""
    curve = []
    for seconds in AGEING:
        runs = [study.run(ShortestFirst(seconds), OVERLOAD * capacity, seed) for seed in study.seeds]
        figures = mean_of([summarize(run, study.machine.seats) for run in runs])
        bound = seconds * LARGEST_COST
        curve.append({"seconds_per_token": seconds, "bound": bound, "mean": figures["mean"], "p99.9": figures["p99.9"]})
    return curve


def compare_correlated(study: Study, capacity: float) -> dict[str, float]:
    """sjf against fcfs, overloaded, where long prompts mostly have long answers: the average over the seeds."""
    alike = dataclasses.replace(study, workload=dataclasses.replace(study.workload, correlation=0.7))
    means = {}
    for name in ("fcfs", "sjf"):
        runs = [alike.run(ORDERS[name](), OVERLOAD * capacity, seed) for seed in alike.seeds]
        means[name] = round(statistics.fmean(run.mean() for run in runs), 5)
    return means


def compare_victims(
    study: Study, capacity: float, choices: Iterable[PreemptionVictim] = tuple(VICTIMS)
) -> dict[str, dict[str, float]]:
    """Every policy and victim choice, overloaded, where blocks are scarce: what preemption costs."""
    compared = {}
    for policy, make in POLICIES.items():
        for victims in choices:
            run = study.run_scarce(make(), OVERLOAD * capacity, study.seeds[0], victims)
            compared[f"{policy}, {victims}"] = summarize(run, study.scarce.seats)
    return compared


def find_claims(policies: dict[str, dict[str, Any]], victims: dict[str, dict[str, float]]) -> dict[str, float]:
    """What the README says of policies, overloaded: the worst of the seeds."""
    runs = {name: figures["seeds"] for name, figures in policies[str(OVERLOAD)].items()}
    seeds = range(len(runs["fcfs"]))

    def saved(name: str, kind: str) -> float:
        return min(1 - runs[name][seed][kind] / runs["fcfs"][seed][kind] for seed in seeds)

    def added(name: str) -> float:
        return max(runs[name][seed]["p99.9"] - runs["fcfs"][seed]["p99.9"] for seed in seeds)

    return {
        "sjf_mean_saved": round(saved("sjf", "mean"), 3),
        "sjf_p99.9_added_seconds": round(added("sjf"), 3),
        "sjf_p99.9_added_seconds_without_ageing": round(added("sjf without ageing"), 3),
        "priority_urgent_mean_saved": round(saved("priority", "urgent_mean"), 3),
        "dynamic_urgent_mean_saved": round(saved("dynamic", "urgent_mean"), 3),
        "most_recomputed_share": max(figures["recomputed_share"] for figures in victims.values()),
        "most_preemptions_per_request": max(figures["preemptions_per_request"] for figures in victims.values()),
    }


def run_study(study: Study) -> dict[str, Any]:
    """All of it."""
    capacity = get_capacity(study.run_saturated(study.machine, study.seeds[0]))
    scarce = get_capacity(study.run_saturated(study.scarce, study.seeds[0]))
    policies, victims = compare_policies(study, capacity), compare_victims(study, scarce)
    return {
        "study": dataclasses.asdict(study),
        "capacity": {"machine": round(capacity, 3), "scarce": round(scarce, 3)},
        "claims": find_claims(policies, victims),
        "batching": compare_batching(study),
        "policies": policies,
        "correlated": compare_correlated(study, capacity),
        "ageing": compare_ageing(study, capacity),
        "victims": victims,
    }


def _thin(series: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Some 200 of the points."""
    return [(round(when, 3), count) for when, count in series[:: max(len(series) // 200, 1)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "policies", help="where to write")
    folder = parser.parse_args().folder
    logging.disable(logging.WARNING)  # the cache is meant to be small
    figures = run_study(Study())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "simulation.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    draw(figures, folder / "simulation.png")


if __name__ == "__main__":
    main()
