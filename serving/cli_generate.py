"""`jaxllm generate`: completes prompts in one batch and prints each with its answer.

The invariant: standard output holds prompts and answers only; progress and speed go to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from jaxllm import LLM
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.cli_commands import Generate, get_fields


def run(command: Generate) -> None:
    config = command.engine.make_config()
    params = command.sampling.make_params()
    prompts = list(command.prompt.prompts) or _read_prompts(sys.stdin)
    with LLM(**get_fields(config)) as llm:
        start = time.perf_counter()
        outputs = _answer(llm, prompts, params, command.prompt.chat)
        seconds = time.perf_counter() - start
    _print_answers(prompts, outputs)
    print(_describe_speed(outputs, seconds), file=sys.stderr)


def _read_prompts(stream: TextIO) -> list[str]:
    if stream.isatty():
        print("Type prompts, one a line; Ctrl-D ends.", file=sys.stderr)
    prompts = [line.rstrip("\r\n") for line in stream if line.strip()]
    if not prompts:
        raise ValueError("there is no prompt: give prompts as arguments, or on standard input, one a line")
    return prompts


def _answer(llm: LLM, prompts: list[str], params: SamplingParams, chat: bool) -> list[RequestOutput]:
    show_progress = sys.stderr.isatty()
    if not chat:
        return llm.generate(prompts, params, use_tqdm=show_progress)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return llm.chat(conversations, params, use_tqdm=show_progress)


def _print_answers(prompts: Sequence[str], outputs: Iterable[RequestOutput]) -> None:
    console = Console(highlight=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        console.print(Text.assemble(("Prompt: ", "bold cyan"), prompt), soft_wrap=True)
        console.print(Text.assemble(("Answer: ", "bold green"), output.outputs[0].text.strip()), soft_wrap=True)
        console.print()


def _describe_speed(outputs: Sequence[RequestOutput], seconds: float) -> str:
    num_read = sum(len(output.prompt_token_ids) for output in outputs)
    num_written = sum(len(output.outputs[0].token_ids) for output in outputs)
    prompts = "1 prompt" if len(outputs) == 1 else f"{len(outputs)} prompts"
    speed = num_written / max(seconds, 1e-9)
    return f"{prompts}, {num_read} tokens read, {num_written} written in {seconds:.1f} s: {speed:.1f} tokens/s"
