"""Whole benchmark runs: from an engine's fields and settings to a report. What commands and scripts call.

Invariant: nothing of the command line is imported. A figure is said on standard error when it is there, as the
next one may take a while.
"""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxllm.bench.attention import measure_attention
from jaxllm.bench.latency import measure_latency
from jaxllm.bench.report import Figure, Report, describe_machine, show_number
from jaxllm.bench.sampling import measure_sampler
from jaxllm.bench.settings import KernelSettings, LatencySettings, StartupSettings, ThroughputSettings
from jaxllm.bench.startup import measure_startup
from jaxllm.bench.throughput import measure_throughput
from jaxllm.llm import LLM
from jaxllm.models.hub import resolve_model
from jaxllm.models.shapes import SHAPES

type EngineFields = Mapping[str, Any]
"""Keywords of `LLM`, the model among them."""


def report_latency(fields: EngineFields, settings: LatencySettings) -> Report:
    """See `measure_latency`."""
    return _with_engine("latency", fields, {"latency": settings}, lambda llm: measure_latency(llm.engine, settings))


def report_throughput(fields: EngineFields, settings: ThroughputSettings) -> Report:
    """See `measure_throughput`."""
    return _with_engine("throughput", fields, {"throughput": settings}, lambda llm: measure_throughput(llm, settings))


def report_all(fields: EngineFields, latency: LatencySettings, throughput: ThroughputSettings) -> Report:
    """Latency, then every workload, nano-vllm's greedily and sampled: all that one start of an engine can give.

    Args:
        throughput: the workloads' sizes; which of them is ignored.
    """

    def measure(llm: LLM) -> Iterable[Figure]:
        yield from measure_latency(llm.engine, latency)
        for sampled in (False, True):
            yield from measure_throughput(llm, dataclasses.replace(throughput, workload="nano", sampled=sampled))
        yield from measure_throughput(llm, dataclasses.replace(throughput, workload="prefill"))
        yield from measure_throughput(llm, dataclasses.replace(throughput, workload="shared-prefix"))

    return _with_engine("all", fields, {"latency": latency, "throughput": throughput}, measure)


def report_startup(fields: EngineFields, settings: StartupSettings) -> Report:
    """See `measure_startup`."""
    name = fields["model"]
    is_shape = fields.get("load_format") == "dummy" and name in SHAPES
    # Fetched now, and named by its path: every start has a cache folder of its own, without pulled models.
    path = name if is_shape else str(resolve_model(name))
    figures, machine = measure_startup({**fields, "model": path}, settings)
    return Report("startup", name, machine, {"engine": dict(fields), "startup": dataclasses.asdict(settings)}, figures)


def report_kernels(settings: KernelSettings) -> Report:
    """See `measure_attention` and `measure_sampler`; a seed is drawn if there is none."""
    seed = secrets.randbits(31) if settings.seed is None else settings.seed
    settings = dataclasses.replace(settings, seed=seed)
    figures = _collect(measure_attention(settings, seed)) + _collect(measure_sampler(settings, seed))
    machine = describe_machine(jax.devices()[:1])
    return Report("kernels", None, machine, {"kernels": dataclasses.asdict(settings)}, figures)


def _with_engine(
    benchmark: str, fields: EngineFields, settings: Mapping[str, Any], measure: Callable[[LLM], Iterable[Figure]]
) -> Report:
    with LLM(**fields) as llm:
        figures = _collect(measure(llm))
        machine = describe_machine(llm.engine.core.runner.mesh.devices.flat)
        engine = dataclasses.asdict(llm.engine.config)
    parameters = {"engine": engine, **{name: dataclasses.asdict(value) for name, value in settings.items()}}
    return Report(benchmark, fields["model"], machine, parameters, figures)


def _collect(figures: Iterable[Figure]) -> list[Figure]:
    collected = []
    for figure in figures:
        print(f"{figure.name}: {show_number(figure.value)} {figure.unit}", file=sys.stderr, flush=True)
        collected.append(figure)
    return collected
