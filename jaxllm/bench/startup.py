"""From the start of a process to its first token, with caches that are empty and with warm ones.

Invariant: a round begins with an empty cache folder, so its first start compiles everything and its second finds
what the first stored. The model's own files are where they were; this process leaves the devices alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxllm.bench.first_token import FIRST_TOKEN
from jaxllm.bench.report import Figure, round_to
from jaxllm.bench.settings import StartupSettings


class Start(NamedTuple):
    """One process."""

    seconds: float
    """From its start to its first token."""
    parts: Mapping[str, float]
    """Seconds of its parts, by name; what is missing is Python's own start."""
    machine: Mapping[str, Any]


def measure_startup(fields: Mapping[str, Any], settings: StartupSettings) -> tuple[list[Figure], Mapping[str, Any]]:
    """Medians over the rounds, and the machine they were measured on.

    Args:
        fields: of `EngineConfig`; the model has to be a path or a shape, as short names lie in the cache folder.

    Raises:
        RuntimeError: a process ended without a token; what it said is on standard error.
    """
    starts: dict[str, list[Start]] = {"caches empty": [], "caches warm": []}
    for _ in range(settings.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for case in starts.values():
                case.append(start(fields, cache))
    if settings.eager:
        starts["eager"] = []
        for _ in range(settings.rounds):
            with tempfile.TemporaryDirectory() as cache:
                starts["eager"].append(start({**fields, "enforce_eager": True}, cache))
    return [_figure(case, measured) for case, measured in starts.items()], starts["caches warm"][0].machine


def start(fields: Mapping[str, Any], cache: str) -> Start:
    """Starts a process over this cache folder and waits for it."""
    command = [sys.executable, "-m", "jaxllm.bench.first_token", json.dumps(fields)]
    environment = os.environ | {"JAXLLM_CACHE": cache}
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        rest = process.stdout.read()
    if line.strip() != FIRST_TOKEN or process.returncode:
        raise RuntimeError(f"a process that was to make a token ended with exit code {process.returncode}")
    report = json.loads(rest.splitlines()[-1])
    return Start(seconds, report["parts"], report["machine"])


def _figure(case: str, starts: list[Start]) -> Figure:
    seconds = [one.seconds for one in starts]
    parts = {name: round_to(statistics.median(one.parts[name] for one in starts)) for name in starts[0].parts}
    details = {"min_s": round_to(min(seconds)), "max_s": round_to(max(seconds)), "rounds": len(starts), **parts}
    return Figure(f"process start to first token, {case}", round_to(statistics.median(seconds)), "s", details)
