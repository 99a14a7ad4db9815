"""Sampling parameters that come as names and values: in a row of JSONL, or after /params in a chat.

The invariant: a name or a value that `SamplingParams` does not take is a ValueError that says what it takes.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm.sampling_params import SamplingParams

NAMES = tuple(item.name for item in dataclasses.fields(SamplingParams) if item.name != "output_kind")
"""All but the one that is a matter between the engine and its caller, which is the command."""


def change_params(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """A copy with other values.

    Raises:
        ValueError: a name is unknown or a value is out of range.
    """
    for name in changes:
        if name not in NAMES:
            raise ValueError(f"{name!r} is not a sampling parameter{suggest(name, NAMES)}")
    return dataclasses.replace(params, **changes)


def parse_changes(words: Iterable[str]) -> dict[str, Any]:
    """Values from words like temperature=0.7; what is no number, true, false, null or JSON is text.

    Raises:
        ValueError: a word has no equals sign.
    """
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not a name and a value: write temperature=0.7, for example")
        changes[name] = _parse_value(text)
    return changes


def suggest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the one it looks like, or all."""
    names = list(names)
    if near := difflib.get_close_matches(name, names, n=1):
        return f": did you mean {near[0]!r}?"
    return f": use one of {', '.join(names)}"


def _parse_value(text: str) -> Any:
    if text == "None":
        return None
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text
