"""How long one step takes: for rows that all decode, for one stream, and up to a first token.

Steps are timed as a caller sees them, from one return of `LLMEngine.step` to the next, with the engine's
run-ahead as it is. Invariant: a timed step gave every row its next token and computed nothing else.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

from jaxllm.bench.report import Figure, round_to
from jaxllm.bench.settings import LatencySettings
from jaxllm.bench.workloads import Workload, random_prompt, same_length
from jaxllm.engine.engine import LLMEngine
from jaxllm.sampling_params import SamplingParams

SETTLING = 8
"""Decode steps before timing begins: the first ones follow the end of the prompts' computation."""
SPARE = 4
"""Decode steps behind the timed ones."""
_MS = 1e3


def measure_latency(engine: LLMEngine, settings: LatencySettings) -> Iterator[Figure]:
    """The figures of `settings`, one after the other as they are measured.

    Raises:
        ValueError: the engine cannot hold so many rows or so long a context.
    """
    for rows in settings.rows:
        yield _decode_figure(engine, rows, settings)
    yield _one_stream(engine, settings)
    yield _first_token(engine, settings)


def decode_seconds(engine: LLMEngine, workload: Workload, steps: int) -> list[float]:
    """Seconds of each of `steps` decode steps of all the workload's rows at once.

    Raises:
        ValueError: the rows never decode for so many steps together: some do not fit.
    """
    rows = len(workload.prompts)
    times, lengths = [time.perf_counter()], [0]
    known: dict[str, int] = {}
    enter_workload(engine, workload)
    while engine.has_unfinished_requests():
        for output in engine.step():
            known[output.request_id] = len(output.outputs[0].token_ids)
        times.append(time.perf_counter())
        lengths.append(sum(known.values()) if len(known) == rows else 0)
    seconds = []
    for (begin, end), (before, after) in zip(itertools.pairwise(times), itertools.pairwise(lengths), strict=True):
        # A step may bring several tokens of every row, where the device runs ahead by itself.
        num_steps, others = divmod(after - before, rows)
        if before and num_steps and not others:
            seconds += [(end - begin) / num_steps] * num_steps
    if len(seconds) < SETTLING + steps:
        longest, limit = workload.num_tokens_of_longest, engine.config.max_model_len
        assert isinstance(limit, int), "unresolved defaults"
        if longest > limit:
            raise ValueError(
                f"rows={rows}: prompt and answer need {longest} tokens, but max_model_len={limit}: "
                "lower rows, context or steps, or raise max_model_len"
            )
        raise ValueError(
            f"rows={rows}: {len(seconds)} of {SETTLING + steps} steps decoded all rows at once, the K/V cache does not "
            "hold them all: lower rows, context or steps, or raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    return seconds[SETTLING : SETTLING + steps]


def _decode_figure(engine: LLMEngine, rows: int, settings: LatencySettings) -> Figure:
    workload = decode_workload(engine, rows, settings.context, settings.steps)
    seconds = decode_seconds(engine, workload, settings.steps)
    details = {
        "p90_ms": round_to(_quantile(seconds, 0.9) * _MS),
        "min_ms": round_to(min(seconds) * _MS),
        "output_tokens_per_s": round_to(rows / statistics.mean(seconds)),
        "steps": settings.steps,
    }
    name = f"decode step, context {settings.context}, {rows} {'row' if rows == 1 else 'rows'}"
    return Figure(name, round_to(statistics.median(seconds) * _MS), "ms", details)


def _one_stream(engine: LLMEngine, settings: LatencySettings) -> Figure:
    workload = decode_workload(engine, 1, settings.prompt_len, settings.steps)
    seconds = decode_seconds(engine, workload, settings.steps)
    name = f"one stream, prompt {settings.prompt_len}, per token"
    return Figure(name, round_to(statistics.mean(seconds) * _MS), "ms", {"steps": settings.steps})


def _first_token(engine: LLMEngine, settings: LatencySettings) -> Figure:
    seconds = []
    for round_ in range(settings.rounds + 1):
        prompt = random_prompt(settings.prompt_len, engine.model_config.vocab_size, seed=1000 + round_)
        start = time.perf_counter()
        engine.add_request("first-token", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        seconds.append(time.perf_counter() - start)
    measured = seconds[1:]
    details = {
        "min_ms": round_to(min(measured) * _MS),
        "max_ms": round_to(max(measured) * _MS),
        "rounds": len(measured),
    }
    name = f"time to first token, prompt {settings.prompt_len}"
    return Figure(name, round_to(statistics.median(measured) * _MS), "ms", details)


def decode_workload(engine: LLMEngine, rows: int, context: int, steps: int) -> Workload:
    """Requests that all decode for `steps` steps; the first ones begin while others' prompts are computed."""
    config = engine.config
    assert config.max_num_seqs and config.max_num_batched_tokens, "unresolved defaults"
    if rows > config.max_num_seqs:
        raise ValueError(
            f"rows={rows} is above max_num_seqs={config.max_num_seqs}: lower the first or raise the second"
        )
    prompt_steps = rows * context // max(config.max_num_batched_tokens - rows, 1) + 1
    output_len = prompt_steps + SETTLING + steps + SPARE
    return same_length(rows, context, output_len, engine.model_config.vocab_size, seed=rows * 10**6 + context)


def enter_workload(engine: LLMEngine, workload: Workload) -> None:
    """Enters all of its requests or, if one is refused, none.

    Raises:
        ValueError: one is refused.
    """
    for index, (prompt, length) in enumerate(zip(workload.prompts, workload.output_lens, strict=True)):
        try:
            engine.add_request(
                f"bench-{index}", prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            )
        except ValueError:
            abort_workload(engine, workload)
            raise


def abort_workload(engine: LLMEngine, workload: Workload) -> None:
    """Ends those of its requests that have not ended."""
    for index in range(len(workload.prompts)):
        engine.abort_request(f"bench-{index}")


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
