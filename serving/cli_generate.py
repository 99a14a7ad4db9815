"""`jaxllm generate`: completes prompts in one batch and prints each with its answer.

The invariant: standard output holds prompts and answers only; progress and speed go to standard error. Either all
prompts are run or, if something is wrong with one of them, none.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

from jaxllm import LLM
from jaxllm.engine.request_maker import Prompt
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.cli_commands import Generate
from jaxllm.serving.cli_flags import get_fields
from jaxllm.serving.cli_input import STANDARD_INPUT, PromptRow, read_rows, rows_of_arguments
from jaxllm.serving.cli_output import choose_layout, open_output, start_over, write_answers


def run(command: Generate) -> None:
    config = command.engine.make_config()
    rows = _get_rows(command, command.sampling.make_params())
    layout = choose_layout(command.files.output_format, command.files.output)
    with open_output(command.files.output) as file:
        with LLM(**get_fields(config)) as llm:
            _check_template(llm, config.model, rows)
            prompts = [_encode(llm, row) for row in rows]
            start = time.perf_counter()
            params, priority = [row.params for row in rows], [row.priority for row in rows]
            outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty(), priority=priority)
            seconds = time.perf_counter() - start
        start_over(file)
        write_answers(file, layout, rows, outputs)
    print(_describe_speed(outputs, seconds), file=sys.stderr)


def _get_rows(command: Generate, params: SamplingParams) -> list[PromptRow]:
    texts, files = command.prompts.texts, command.files
    if texts and files.input is not None:
        raise ValueError(f"input={files.input!r} and prompts on the command line: give one or the other")
    if texts:
        rows = rows_of_arguments(texts, params)
    else:
        rows = read_rows(files.input or STANDARD_INPUT, files.input_format, params)
    return [_as_chat(row) for row in rows] if files.chat else rows


def _as_chat(row: PromptRow) -> PromptRow:
    if row.messages is not None:
        return row
    return dataclasses.replace(row, messages=[{"role": "user", "content": row.prompt}])


def _check_template(llm: LLM, model: str, rows: Sequence[PromptRow]) -> None:
    if llm.get_tokenizer().has_chat_template:
        return
    for row in rows:
        if row.messages is not None:
            raise ValueError(
                f"model={model!r} has no chat template: leave --chat away, or in JSONL give prompt instead of messages"
            )


def _encode(llm: LLM, row: PromptRow) -> Prompt:
    """The prompt's token ids, checked, so that what is wrong with it is said with the line it was on."""
    try:
        prompt = row.prompt if row.messages is None else llm.get_tokenizer().encode_chat(row.messages)
        assert prompt is not None, "a row without prompt and messages"
        # With a seed, the engine draws none: the answers are those of `LLM.generate` called in a program.
        params = dataclasses.replace(row.params, seed=0)
        _, request = llm.engine.make_request(row.request_id, prompt, params, row.priority)
    except ValueError as error:
        raise ValueError(f"{row.origin}: {error}") from error
    return request.prompt_ids


def _describe_speed(outputs: Sequence[RequestOutput], seconds: float) -> str:
    num_read = sum(len(output.prompt_token_ids) for output in outputs)
    num_written = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    prompts = "1 prompt" if len(outputs) == 1 else f"{len(outputs)} prompts"
    speed = num_written / max(seconds, 1e-9)
    return f"{prompts}, {num_read} tokens read, {num_written} written in {seconds:.1f} s: {speed:.1f} tokens/s"
