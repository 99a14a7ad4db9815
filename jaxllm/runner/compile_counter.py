"""Counts XLA compilations of the process, so that "nothing compiles after ready" can be checked."""

from __future__ import annotations

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_compilations = 0


def _on_event(event: str, duration_secs: float, **_: object) -> None:
    global _compilations  # noqa: PLW0603 - JAX's listeners are per process, so is the count
    if event == COMPILE_EVENT:
        _compilations += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


def num_compilations() -> int:
    """XLA compilations since this module was first imported; cache hits of JAX's persistent cache count too."""
    return _compilations
