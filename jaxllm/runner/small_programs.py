"""Executables beside the steps: from disk, or compiled.

Invariant: a program is kept under its name, beside the steps that share its facts; the same name is always the same
program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxllm.runner.executable_store import ExecutableStore


def get_program(
    store: ExecutableStore | None, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], outputs: Any
) -> jax.stages.Compiled:
    """A program for arguments like these (pytrees of `jax.ShapeDtypeStruct` with shardings).

    Args:
        store: None where nothing is kept.
        outputs: a pytree of the results' specs. If it is the first argument, that one is updated in place.
    """
    stored = store.load(name, arguments, outputs) if store else None
    if stored is not None:
        return stored
    sharding = jax.tree.map(lambda spec: spec.sharding, outputs)
    donated = (0,) if outputs is arguments[0] else ()
    compiled = jax.jit(function, donate_argnums=donated, out_shardings=sharding).lower(*arguments).compile()
    if store:
        store.save(name, compiled)
    return compiled
