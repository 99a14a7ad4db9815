"""Does an answer depend on what else runs? Every request alone, then among others, compared bit by bit. Writes the JSON.

    python3 scripts/check_invariance.py [--model qwen3-0.6b] [--requests 48] [--folder FOLDER] [--commit HASH] [--fastest]

Half of the requests take the most likely token, half draw under a seed. What is compared are their tokens and the float32
log-probabilities of these, which tell of a change long before a token does. The model is random: close calls are
frequent. --fastest does the same without batch_invariant, to see what it changes. FOLDER is by default $OUT, or
benchmarks/. Exit code 1: an answer differs (never with --fastest).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402 - a checkout that is not installed is measured, too
import numpy as np  # noqa: E402

from jaxllm import LLMEngine, SamplingParams  # noqa: E402
from jaxllm.bench.report import Figure, Report, describe_machine  # noqa: E402

ENGINE = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048, "compilation_cache": False}
TOKENS, LONGEST_PROMPT, SEED = 64, 1500, 11
SHORT_OF_MEMORY = {
    "block_size": 16,
    "num_gpu_blocks_override": 256,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
}
"""A fifth of what 48 requests take together, and prompts in chunks of other sizes."""


class Request(NamedTuple):
    """One prompt, and how it is to be answered."""

    name: str
    prompt: list[int]
    params: SamplingParams


class Answer(NamedTuple):
    """What has to be the same."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


type Answers = Mapping[str, Answer]
type Case = tuple[str, Answers, Answers]
"""Its name, what was found, and what is right."""


def make_requests(count: int, vocab_size: int) -> list[Request]:
    """Prompts of any length up to LONGEST_PROMPT, a third of them with the same beginning."""
    rng = np.random.default_rng(SEED)
    shared = rng.integers(10, vocab_size, LONGEST_PROMPT // 2)
    requests = []
    for index in range(count):
        own = rng.integers(10, vocab_size, rng.integers(1, LONGEST_PROMPT // 2))
        prompt = np.concatenate([shared, own]) if index % 3 == 0 else own
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
        if index % 2:
            params = dataclasses.replace(params, temperature=0.9, top_p=0.95, seed=index)
        requests.append(Request(f"request {index}", prompt.tolist(), params))
    return requests


def run(engine: LLMEngine, requests: Sequence[Request], steps_between: int = 0) -> Answers:
    """Answers to all of them, one added every `steps_between` steps, or all at once."""
    answers: dict[str, Answer] = {}
    num_added, due = 0, len(requests) if steps_between == 0 else 1
    for step in itertools.count(1):
        for request in requests[num_added:due]:
            engine.add_request(request.name, request.prompt, request.params)
        num_added = due
        for output in engine.step():
            if output.finished:
                found = output.outputs[0]
                chosen = zip(found.token_ids, found.logprobs or (), strict=True)
                answers[output.request_id] = Answer(
                    tuple(found.token_ids), tuple(of_one[token].logprob for token, of_one in chosen)
                )
        if len(answers) == len(requests):
            break
        if steps_between and (step % steps_between == 0 or not engine.has_unfinished_requests()):
            due = min(num_added + 1, len(requests))
    return answers


def alone(engine: LLMEngine, requests: Sequence[Request]) -> Answers:
    """Each with the engine to itself, and nothing in the prefix cache."""
    answers = {}
    for request in requests:
        answers |= run(engine, [request])
        engine.reset_prefix_cache()
    return answers


def continued(requests: Sequence[Request], right: Answers) -> tuple[list[Request], Answers]:
    """Prompts that contain half of their greedy answer already, as the turns of a conversation do, and its other half."""
    half, prompts, rest = TOKENS // 2, [], {}
    for request in requests:
        if request.params.temperature == 0:
            answer = right[request.name]
            params = dataclasses.replace(request.params, max_tokens=TOKENS - half)
            prompts.append(Request(request.name, request.prompt + list(answer.tokens[:half]), params))
            rest[request.name] = Answer(answer.tokens[half:], answer.logprobs[half:])
    return prompts, rest


def measure(fields: Mapping[str, Any], count: int) -> Iterator[Case]:
    """Every case; the first engine has room for all, the others have not."""
    with LLMEngine(**fields, max_num_seqs=64, max_num_batched_tokens=2048) as engine:
        requests = make_requests(count, engine.core.runner.model.vocab_size)
        right = alone(engine, requests)
        yield "all at once", run(engine, requests), right
        yield "again, from the prefix cache", run(engine, requests), right
        engine.reset_prefix_cache()
        yield "in another order, one after the other", run(engine, requests[::-1], steps_between=3), right
        prompts, rest = continued(requests, right)
        yield "the answer's first half in the prompt, cached", run(engine, prompts), rest
        engine.reset_prefix_cache()
        yield "the answer's first half in the prompt, computed", run(engine, prompts), rest
    for mode, space in (("recompute", 0), ("swap", 4)):
        tight = {**SHORT_OF_MEMORY, "preemption_mode": mode, "swap_space": space, "max_num_seqs": 64}
        with LLMEngine(**fields, **tight) as engine:
            found = run(engine, requests)
            preempted = engine.core.scheduler.num_preemptions
        yield f"short of memory, {mode}, {preempted} preemptions", found, right


def compare(case: Case) -> Figure:
    """How many answers have another bit."""
    name, found, right = case
    assert found.keys() == right.keys(), name
    answers = sum(found[key] != right[key] for key in right)
    tokens = sum(a != b for key in right for a, b in zip(found[key].tokens, right[key].tokens, strict=True))
    logprobs = sum(a != b for key in right for a, b in zip(found[key].logprobs, right[key].logprobs, strict=True))
    total = sum(len(answer.tokens) for answer in right.values())
    details = {"answers": len(right), "tokens": total, "differing_tokens": tokens, "differing_logprobs": logprobs}
    return Figure(f"answers that differ: {name}", answers, "answers", details)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a built-in shape")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT") or ROOT / "benchmarks"))
    parser.add_argument("--commit", help="the commit, where the checkout is a copy without its history")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--fastest", action="store_true", help="without batch_invariant")
    arguments = parser.parse_args()
    fields = {"model": arguments.model, "tensor_parallel_size": arguments.tensor_parallel_size, **ENGINE}
    fields["batch_invariant"] = not arguments.fastest
    figures = []
    for case in measure(fields, arguments.requests):
        figures.append(compare(case))
        print(f"{figures[-1].name}: {figures[-1].value} {dict(figures[-1].details)}", flush=True)
    machine = describe_machine(jax.devices()[: arguments.tensor_parallel_size])
    report = Report("invariance", arguments.model, machine, {"engine": fields}, figures)
    command = f"scripts/check_invariance.py --model {arguments.model} --requests {arguments.requests}"
    command += " --fastest" if arguments.fastest else ""
    report = dataclasses.replace(report, command=command, commit=arguments.commit or report.commit)
    name = "fastest" if arguments.fastest else "invariance"
    report.write(arguments.folder / f"{report.date[:10]}-{name}-{arguments.model}.json")
    return int(not arguments.fastest and any(figure.value for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
