"""Reads the prompts of `jaxllm generate`, from arguments, a file or standard input, as text or as JSONL.

The invariant: every prompt is read and checked before the first one is run, and a message about one says where it was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxllm.engine.chat_template import Message, check_messages
from jaxllm.engine.request_maker import check_priority
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.cli_params import NAMES, change_params, suggest

type Format = Literal["auto", "text", "jsonl"]

STANDARD_INPUT = "-"
_OWN_KEYS = ("prompt", "messages", "request_id", "priority")


@dataclass(frozen=True)
class PromptRow:
    """One prompt: a text to complete, or a conversation to continue."""

    origin: str
    """Where it was read, for messages: "prompts.txt, line 3"."""
    request_id: str
    prompt: str | None
    messages: Sequence[Message] | None
    params: SamplingParams
    priority: int = 0

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a text cannot be encoded; the message says where it was.
        """
        texts = [self.request_id, self.prompt]
        if self.messages is not None:  # of which the answers' file shows all
            texts += [message["content"] for message in self.messages] + [json.dumps(self.messages, ensure_ascii=False)]
        try:
            for text in texts:
                check_text(text or "")
        except ValueError as error:
            raise ValueError(f"{self.origin}: {error}") from error


@dataclass(frozen=True)
class Line:
    """A line of a file or of standard input that is not blank."""

    origin: str
    text: str


def rows_of_arguments(texts: Sequence[str], params: SamplingParams) -> list[PromptRow]:
    """Prompts that were written on the command line."""
    return [PromptRow(f"prompt {index + 1}", str(index), text, None, params) for index, text in enumerate(texts)]


def read_rows(path: str, layout: Format, params: SamplingParams) -> list[PromptRow]:
    """The prompts of a file, or of standard input.

    Args:
        path: the file, or "-".
        layout: auto takes JSONL for what is named so or begins with an opening brace.
        params: of every prompt that has none of its own.

    Raises:
        ValueError: the file cannot be read or has no prompt, or a line is wrong; the message names it.
    """
    lines = list(_read_lines(path))
    if not lines:
        raise ValueError(f"there is no prompt in {_name_of(path)}: write one a line, or give prompts as arguments")
    if layout == "auto":
        is_jsonl = is_named_jsonl(path) or lines[0].text.lstrip().startswith("{")
        layout = "jsonl" if is_jsonl else "text"
    if layout == "text":
        return [PromptRow(line.origin, str(index), line.text, None, params) for index, line in enumerate(lines)]
    return [_parse_row(line, str(index), params) for index, line in enumerate(lines)]


def check_text(text: str) -> None:
    """Raises ValueError if a text holds what is no character: the trace of bytes that were no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!r} at position {error.start} is no character: write UTF-8") from error


def is_named_jsonl(path: str) -> bool:
    return Path(path).suffix.lower() in (".jsonl", ".ndjson")


def _name_of(path: str) -> str:
    return "standard input" if path == STANDARD_INPUT else path


def _read_lines(path: str) -> Iterator[Line]:
    if path == STANDARD_INPUT:
        if sys.stdin.isatty():
            print("Type prompts, one a line; Ctrl-D ends.", file=sys.stderr)
        yield from _decode_lines(_name_of(path), sys.stdin.buffer)
        return
    try:
        with Path(path).expanduser().open("rb") as file:
            yield from _decode_lines(path, file)
    except OSError as error:
        raise ValueError(f"input={path!r} cannot be read: {error.strerror}: name a file of prompts") from error


def _decode_lines(name: str, file: Iterable[bytes]) -> Iterator[Line]:
    for number, raw in enumerate(file, start=1):
        origin = f"{name}, line {number}"
        try:
            # A byte order mark may begin the file, not a later line.
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{origin}: byte {raw[error.start]:#04x} is not UTF-8: save it as UTF-8") from error
        if text.strip():
            yield Line(origin, text)


def _parse_row(line: Line, default_id: str, params: SamplingParams) -> PromptRow:
    try:
        values = _parse_object(line.text)
        _check_keys(values)
        params = change_params(params, {name: value for name, value in values.items() if name not in _OWN_KEYS})
    except ValueError as error:
        raise ValueError(f"{line.origin}: {error}") from error
    request_id = str(values.get("request_id", default_id))
    prompt, messages, priority = values.get("prompt"), values.get("messages"), values.get("priority", 0)
    return PromptRow(line.origin, request_id, prompt, messages, params, priority)


def _parse_object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is not JSON: {error.msg} at column {error.colno} (for lines of text give --input-format text)"
        ) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply: write an object of texts and numbers") from error
    if not isinstance(values, dict):
        raise ValueError(f'it is a JSON {type(values).__name__}: write an object, as {{"prompt": "Hello"}}')
    return values


def _check_keys(values: dict[str, Any]) -> None:
    for name in values:
        if name not in _OWN_KEYS and name not in NAMES:
            raise ValueError(f"{name!r} is not known{suggest(name, (*_OWN_KEYS, *NAMES))}")
    if ("prompt" in values) == ("messages" in values):
        raise ValueError('it needs either "prompt" or "messages", as {"prompt": "Hello"}')
    if "messages" in values:
        check_messages(values["messages"])
    elif not isinstance(values["prompt"], str):
        raise ValueError(f"prompt={values['prompt']!r} is not valid: give a text")
    request_id = values.get("request_id", "")
    if not isinstance(request_id, str | int):
        raise ValueError(f"request_id={request_id!r} is not valid: give a text or a number")
    check_priority(values.get("priority", 0))
