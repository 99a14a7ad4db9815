"""Seconds of one call of a compiled function, and whose function it is.

Invariant: many calls are in flight, so that what is measured is the device's time wherever that is longer than a
call takes the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from jaxllm.bench.settings import KernelSettings
from jaxllm.kernels.backend import Backend

ROUNDS = 3
_LEAST_SECONDS = 0.05
_MOST_CALLS = 50


def seconds_per_call(call: Callable[..., Any], *arguments: Any) -> float:
    """The best mean of a few rounds of calls; the first call, which compiles, is not counted."""
    jax.block_until_ready(call(*arguments))
    once = _mean(call, arguments, 1)
    calls = max(1, min(_MOST_CALLS, int(_LEAST_SECONDS / once)))
    return min(_mean(call, arguments, calls) for _ in range(ROUNDS))


def choose_backend(settings: KernelSettings) -> Backend:
    """What an engine takes on this device, unless the settings name one."""
    if settings.backend != "auto":
        return settings.backend
    return "xla" if jax.default_backend() == "cpu" else "pallas"


def _mean(call: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([call(*arguments) for _ in range(calls)][-1])
    return (time.perf_counter() - start) / calls
