"""The simulation of scheduling policies, in small: what the README says of them holds, and the cost model is near."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from jaxllm.scheduling.plan import PlanRow, StepPlan

ROOT = Path(__file__).resolve().parent.parent


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses, and scripts that import it, look for it
    spec.loader.exec_module(module)
    return module


pytest.importorskip("matplotlib")
sim, plot, script = (load_script(name) for name in ("policy_simulation", "policy_plot", "simulate_policies"))

SMALL = script.Study(sim.Machine(seats=24, blocks=1200), sim.Machine(seats=96, blocks=1600), count=500, seeds=(0,))


@pytest.fixture(scope="module", autouse=True)
def no_warnings():
    """The cache is meant to be small."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def capacity():
    return script.get_capacity(SMALL.run_saturated(SMALL.machine, 0))


@pytest.fixture(scope="module")
def policies(capacity):
    return script.compare_policies(SMALL, capacity)


@pytest.fixture(scope="module")
def victims():
    capacity = script.get_capacity(SMALL.run_saturated(SMALL.scarce, 0))
    return script.compare_victims(SMALL, capacity, ["lowest_priority"])


@pytest.fixture(scope="module")
def batching():
    return script.compare_batching(SMALL)


def test_what_is_claimed_of_policies_at_overload(policies, victims):
    claims = script.find_claims(policies, victims)
    print(claims)
    assert claims["sjf_mean_saved"] > 0.3
    assert claims["priority_urgent_mean_saved"] > 0.6
    assert claims["most_recomputed_share"] < 0.15
    assert claims["most_preemptions_per_request"] < 0.3


def test_ageing_bounds_the_longest_waits(policies, capacity):
    overload, seconds = policies["1.5"], 0.002
    aged = SMALL.run(script.ShortestFirst(seconds), 1.5 * capacity, 0).percentile(99.9)
    bound = overload["fcfs"]["p99.9"] + seconds * script.LARGEST_COST
    assert aged < bound < overload["sjf without ageing"]["p99.9"]


def test_below_capacity_all_policies_serve_alike(policies):
    means = [figures["mean"] for figures in policies["0.9"].values()]
    assert max(means) < 1.25 * min(means)


def test_continuous_batching_makes_twice_as_many_tokens_as_static(batching):
    print({name: batching[name] for name in ("continuous", "static", "ratio")})
    assert batching["ratio"] > 2
    assert batching["continuous"]["busy_share"] > 0.6 > 0.3 > batching["static"]["busy_share"]


def test_requests_of_a_seed_are_the_same_and_have_the_lengths_that_are_told():
    jobs = sim.Workload().make(4000, rate=10, seed=1)
    assert jobs == sim.Workload().make(4000, rate=10, seed=1) != sim.Workload().make(4000, rate=10, seed=2)
    prompts, outputs = (sorted(getattr(job, name) for job in jobs)[2000] for name in ("prompt_len", "output_len"))
    assert prompts == pytest.approx(300, rel=0.05) and outputs == pytest.approx(150, rel=0.05)
    assert jobs[-1].arrival == pytest.approx(400, rel=0.05)
    assert {job.make_request().params.max_tokens for job in jobs} == {1024}, "nobody is told the true length"


@pytest.mark.parametrize(
    ("rows", "start", "tokens", "milliseconds"),
    [
        (1, 511, 1, 4.38),
        (64, 511, 1, 6.1),
        (256, 511, 1, 12.1),
        (1, 0, 512, 11.3),
        (1, 0, 2048, 46),
        (1, 0, 8192, 186),
    ],
)
def test_the_cost_model_is_within_a_seventh_of_what_was_measured(rows, start, tokens, milliseconds):
    """On an H200: benchmarks/2026-11-29-all-8b.json, and prompts as they were measured without an engine."""
    plan = StepPlan(tuple(PlanRow(None, 0, start, tokens, 0, 0, (), False, True) for _ in range(rows)))
    assert sim.step_seconds(plan) * 1e3 == pytest.approx(milliseconds, rel=1 / 7)


def test_the_plot_is_drawn(tmp_path, policies, batching):
    curve = [
        {"seconds_per_token": 0.0, "mean": 2.0, "p99.9": 3.0},
        {"seconds_per_token": 1.0, "mean": 1.0, "p99.9": 9.0},
    ]
    figures = {"policies": policies, "ageing": curve, "batching": batching}
    plot.draw(figures, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
