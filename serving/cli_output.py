"""Writes what `jaxllm generate` made, as text to read or as JSONL for a program.

The invariants: a row of JSONL holds what was asked as it was asked (prompt or messages), and keys named as vLLM's
fields and OpenAI's `usage`; what a file held stays in it until there is something to write instead.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.serving.cli_input import Format, PromptRow, is_named_jsonl


@contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """The file to write to, once `start_over` was called; standard output for None.

    Raises:
        ValueError: it cannot be written.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        file = Path(path).expanduser().open("a", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output={path!r} cannot be written: {error.strerror}: name another file") from error
    with file:
        yield file


def start_over(file: TextIO) -> None:
    """Empty a file of `open_output`; standard output, pipes and devices are as they are."""
    if file is not sys.stdout and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)


def check_writable(path: str, field: str) -> None:
    """Before hours of work: whether their result can be written to a new file or over an old one, in a folder that is
    made if need be.

    Raises:
        ValueError: it cannot.
    """
    file = Path(path).absolute()
    place = next(one for one in (file, *file.parents) if one.exists())
    if file.is_dir() or (place != file and not place.is_dir()) or not os.access(place, os.W_OK):
        raise ValueError(f"{field}={path!r} cannot be written, because of {place}: name another file")


def choose_layout(layout: Format, path: str | None) -> Format:
    """Text or JSONL, where auto goes by the name of the file."""
    if layout != "auto":
        return layout
    return "jsonl" if path is not None and is_named_jsonl(path) else "text"


def write_answers(file: TextIO, layout: Format, rows: Sequence[PromptRow], outputs: Sequence[RequestOutput]) -> None:
    """Write one answer after the other, in the order of the prompts; of one prompt there may be several (`n`)."""
    if layout == "text":
        _write_text(file, rows, outputs)
        return
    for index, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        for answer in output.outputs:
            file.write(json.dumps(_make_record(index, row, output, answer), ensure_ascii=False) + "\n")


def _write_text(file: TextIO, rows: Sequence[PromptRow], outputs: Sequence[RequestOutput]) -> None:
    console = Console(file=file, highlight=False)
    for row, output in zip(rows, outputs, strict=True):
        console.print(Text.assemble(("Prompt: ", "bold cyan"), _last_text(row)), soft_wrap=True)
        for answer in output.outputs:
            console.print(Text.assemble(("Answer: ", "bold green"), answer.text.strip()), soft_wrap=True)
        console.print()


def _last_text(row: PromptRow) -> str:
    if row.prompt is not None:
        return row.prompt
    assert row.messages, "a row without prompt and messages"
    return row.messages[-1]["content"] or ""


def _make_record(index: int, row: PromptRow, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
    num_prompt, num_answer = len(output.prompt_token_ids), len(answer.token_ids)
    return {
        "request_id": row.request_id,
        "index": index,
        **({"answer_index": answer.index} if len(output.outputs) > 1 else {}),
        **({"messages": row.messages} if row.prompt is None else {"prompt": row.prompt}),
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        **_make_logprobs(output, answer),
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
        },
    }


def _make_logprobs(output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
    """For each token a list of candidates, itself first; nothing for a request that does not ask."""
    asked = {"logprobs": answer.logprobs, "prompt_logprobs": output.prompt_logprobs if answer.index == 0 else None}
    return {
        name: [
            None if found is None else [{"token_id": token, **dataclasses.asdict(one)} for token, one in found.items()]
            for found in positions
        ]
        for name, positions in asked.items()
        if positions is not None
    }
