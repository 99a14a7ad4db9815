"""A profile of decode steps of so many rows and so long a context, and the time of the same steps unprofiled.

Invariant: the steps that are recorded follow those that are only timed, of the same requests: what differs is that
they are recorded.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

from jaxllm.bench.latency import SETTLING, abort_workload, decode_workload, enter_workload
from jaxllm.bench.report import Report, describe_machine
from jaxllm.bench.settings import ProfileSettings
from jaxllm.engine.engine import LLMEngine
from jaxllm.profiling.host_work import HOST_WORK
from jaxllm.profiling.report import Profile, write_report
from jaxllm.runner.annotations import annotate, annotate_step

_ROUNDS, _STEPS = 5, 2000
"""That the annotations are timed in."""


def profile_decode(engine: LLMEngine, settings: ProfileSettings) -> Profile:
    """Times `settings.steps` decode steps, then records as many; `settings.output` gets what was recorded.

    Raises:
        ValueError: the engine cannot hold so many rows or so long a context.
        OSError: the folder cannot be written to.
    """
    # Calls of several steps may overshoot, and some are in flight at every border.
    spare = 4 * engine.core.runner.programs.max_steps * engine.config.max_steps_in_flight
    workload = decode_workload(engine, settings.rows, settings.context, 2 * settings.steps + spare)
    enter_workload(engine, workload)
    try:
        decoding = _Decoding(engine, settings.rows)
        decoding.settle()
        unprofiled = decoding.run(settings.steps)
        session = engine.core.start_profile(Path(settings.output))
        session.unprofiled_step_ms = unprofiled * 1e3
        try:
            decoding.run(settings.steps)
        finally:
            folder = engine.core.stop_profile()
    finally:
        abort_workload(engine, workload)
    return write_report(folder)


def to_report(profile: Profile, engine: LLMEngine, settings: ProfileSettings) -> dict[str, Any]:
    """A profile as JSON that says how to measure it again, as every `Report`.

    With what a step's annotations take while nothing is recorded.
    """
    parameters = {"engine": dataclasses.asdict(engine.config), "profile": dataclasses.asdict(settings)}
    machine = describe_machine(engine.core.runner.mesh.devices.flat)
    report = Report("profile", engine.config.model, machine, parameters, figures=[])
    return dataclasses.asdict(report) | {"annotations_us": annotations_us(), "summary": profile.summary.to_dict()}


def annotations_us() -> float:
    """Microseconds that a step's annotations take while nothing is recorded."""
    seconds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_STEPS):
            with annotate_step():
                for name in HOST_WORK:
                    with annotate(name):
                        pass
        seconds.append((time.perf_counter() - begin) / _STEPS)
    return min(seconds) * 1e6


class _Decoding:
    """Requests that all decode at once."""

    def __init__(self, engine: LLMEngine, rows: int):
        self._engine, self._rows = engine, rows
        self._known: dict[str, int] = {}

    def settle(self) -> None:
        """Brings them there; raises ValueError as `run` does."""
        while len(self._known) < self._rows or min(self._known.values()) < SETTLING:
            self._step()

    def run(self, steps: int) -> float:
        """Seconds of a step, the median of at least so many.

        Raises:
            ValueError: one of them ended, before others began.
        """
        seconds: list[float] = []
        begin = time.perf_counter()
        while len(seconds) < steps:
            count, others = divmod(self._step(), self._rows)
            end = time.perf_counter()
            # A step may bring several tokens of every row, where the device runs ahead by itself.
            seconds += [(end - begin) / count] * count if count and not others else []
            begin = end
        return statistics.median(seconds)

    def _step(self) -> int:
        """Tokens that came of it."""
        before = sum(self._known.values())
        for output in self._engine.step():
            self._known[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                raise ValueError(
                    f"rows={self._rows}: they never decode all at once, the K/V cache does not hold them all: lower "
                    "rows, context or steps, or raise kv_cache_memory_bytes or gpu_memory_utilization"
                )
        return sum(self._known.values()) - before
