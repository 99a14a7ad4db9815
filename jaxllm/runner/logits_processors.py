"""Functions of the user's own that every row's logits go through; the engine knows them from its start on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.runner.logit_changes import LogitsProcessor


def load_processors(named: Sequence[str | Callable[..., Any]], vocab_size: int) -> tuple[LogitsProcessor, ...]:
    """The functions, checked on the shapes that they will see.

    Args:
        named: functions, or where to import them from ("package.module:function").
        vocab_size: the model's.

    Raises:
        ValueError: one cannot be imported, or is not a function of float32 logits [rows, vocab] to such logits.
    """
    return tuple(_check(_load(one), vocab_size) for one in named)


def _load(named: str | Callable[..., Any]) -> LogitsProcessor:
    if not isinstance(named, str):
        return named
    module, colon, name = named.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "" if colon else '; write "package.module:function"'
        raise ValueError(f"logits_processors: {named!r} cannot be imported: {error}{hint}") from error


def _check(processor: LogitsProcessor, vocab_size: int) -> LogitsProcessor:
    given = jax.ShapeDtypeStruct((2, vocab_size), jnp.float32)
    try:
        returned = jax.eval_shape(processor, given)
    except Exception as error:
        raise ValueError(
            f"logits_processors: {processor!r} fails on float32 logits [rows, vocab]: {error}; use a pure function of JAX"
        ) from error
    if getattr(returned, "shape", None) != given.shape or returned.dtype != given.dtype:
        raise ValueError(
            f"logits_processors: {processor!r} returns {returned}: it has to return float32 logits of the shape it got"
        )
    return processor
