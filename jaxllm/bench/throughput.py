"""How much an engine answers in a batch: whole workloads through `LLM.generate`.

Invariant: what is timed ran before with other tokens, so that nothing is met for the first time, and no
prompt begins as an earlier one did unless the workload says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.bench.report import Figure, round_to
from jaxllm.bench.settings import ThroughputSettings, WorkloadName
from jaxllm.bench.workloads import Workload, nano, random_prompt, same_length, shared_prefix
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams

GREEDY: Mapping[str, Any] = {"temperature": 0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


def measure_throughput(llm: LLM, settings: ThroughputSettings) -> Iterator[Figure]:
    """The figures of `settings.workload`, one after the other as they are measured.

    Raises:
        ValueError: a request is longer than max_model_len.
    """
    yield from _WORKLOADS[settings.workload](llm, settings)


@dataclass(frozen=True)
class Run:
    """What a workload took."""

    workload: Workload
    seconds: float
    steps: int
    tokens: int
    """Tokens that were computed."""
    padded_tokens: int
    """Tokens of the steps' shapes."""
    preemptions: int

    @property
    def details(self) -> dict[str, float]:
        return {
            "seconds": round_to(self.seconds),
            "requests": len(self.workload.prompts),
            "prompt_tokens": self.workload.num_prompt_tokens,
            "output_tokens": self.workload.num_output_tokens,
            "steps": self.steps,
            "padding_share": round_to(1 - self.tokens / max(self.padded_tokens, 1), 3),
            "preemptions": self.preemptions,
        }


def run_workload(llm: LLM, workload: Workload, sampling: Mapping[str, Any] = GREEDY) -> Run:
    """Answers all requests of a workload at once, to their full lengths."""
    params = [SamplingParams(max_tokens=length, ignore_eos=True, **sampling) for length in workload.output_lens]
    core = llm.engine.core
    before = (*core.runner.counts.values, core.scheduler.num_preemptions)
    start = time.perf_counter()
    outputs = llm.generate(list(workload.prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - start
    answered = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert answered == workload.num_output_tokens, f"{answered} of {workload.num_output_tokens} tokens were generated"
    after = (*core.runner.counts.values, core.scheduler.num_preemptions)
    return Run(workload, seconds, *(new - old for new, old in zip(after, before, strict=True)))


def _nano(llm: LLM, settings: ThroughputSettings) -> Iterator[Figure]:
    variants = [
        nano(settings.num_prompts, settings.longest, variant, _vocab_size(llm)) for variant in (1, 2 * settings.sampled)
    ]
    run_workload(llm, variants[0])
    run = run_workload(llm, variants[1], SAMPLED if settings.sampled else GREEDY)
    name = f"{settings.num_prompts} requests of nano-vllm's benchmark, {'sampled' if settings.sampled else 'greedy'}"
    if settings.longest != ThroughputSettings.longest:
        name += f", up to {settings.longest} tokens"
    yield Figure(name, round_to(run.workload.num_output_tokens / run.seconds), "output tok/s", run.details)


def _prefill(llm: LLM, settings: ThroughputSettings) -> Iterator[Figure]:
    runs = [
        run_workload(llm, same_length(settings.num_prompts, settings.prefill_len, 1, _vocab_size(llm), seed))
        for seed in (11, 12)
    ]
    name = f"{settings.num_prompts} prompts of {settings.prefill_len} tokens, 1 token each"
    yield Figure(name, round_to(runs[1].workload.num_prompt_tokens / runs[1].seconds), "prompt tok/s", runs[1].details)


def _shared_prefix(llm: LLM, settings: ThroughputSettings) -> Iterator[Figure]:
    vocab_size = _vocab_size(llm)
    size = (settings.num_prompts, settings.own_len, settings.output_len, vocab_size)
    prefix = random_prompt(settings.prefix_len, vocab_size, seed=21)
    alone = same_length(
        settings.num_prompts, settings.prefix_len + settings.own_len, settings.output_len, vocab_size, seed=22
    )
    workloads = {
        "prefix new": shared_prefix(prefix, same_length(*size, seed=23)),
        "prefix cached": shared_prefix(prefix, same_length(*size, seed=24)),
        "nothing shared": alone,
    }
    warm_up = random_prompt(settings.prefix_len, vocab_size, seed=25)
    run_workload(llm, shared_prefix(warm_up, same_length(settings.num_prompts, *size[1:], seed=26)))
    name = f"{settings.num_prompts} requests of {settings.prefix_len} + {settings.own_len} tokens, {settings.output_len} of answer"
    for case, workload in workloads.items():
        run = run_workload(llm, workload)
        yield Figure(f"{name}, {case}", round_to(run.seconds), "s", run.details)


def _vocab_size(llm: LLM) -> int:
    return llm.engine.model_config.vocab_size


_WORKLOADS: Mapping[WorkloadName, Any] = {"nano": _nano, "prefill": _prefill, "shared-prefix": _shared_prefix}
