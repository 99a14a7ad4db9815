"""The heart of the suite: a request's tokens are the dense model's, whatever the engine does around it.

Sixteen requests of mixed lengths, half of them greedy and half sampled under a seed, run alone, in one
batch, in chunks, preempted, with any number of steps in flight, and on several devices.
"""

import random

import pytest
from tiny_model import CONTEXT, VOCAB, Oracle, check_answer, make_params, write_model

from jaxllm import LLMEngine
from jaxllm.outputs import RequestOutput

NUM_REQUESTS = 16
LOGPROB_BOUND = 1e-4


def make_requests():
    """Prompts from one token to most of the context, each with an answer of another length."""
    rng = random.Random(3)
    requests = []
    for index in range(NUM_REQUESTS):
        length = [1, 2, 15, 16, 17, 31, 33, 64][index % 8] + index // 8 * 20
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        requests.append((prompt, make_params(index, rng.randrange(20, 50))))
    return requests


REQUESTS = make_requests()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("equivalence") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def executables(tmp_path_factory):
    """A cache folder of its own: variants of the same shapes share what is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def run(engine: LLMEngine, indices, stagger: bool = False) -> dict[int, tuple[RequestOutput, list[float]]]:
    """Answers and log-probabilities by request; `stagger` lets one request join per step."""
    waiting = list(indices)
    results: dict[int, tuple[RequestOutput, list[float]]] = {}
    logprobs: dict[int, list[float]] = {}
    while waiting or engine.has_unfinished_requests():
        for index in [waiting.pop(0)] if waiting and stagger else [waiting.pop(0) for _ in list(waiting)]:
            priority = index % 3 if engine.request_maker.uses_priority else 0
            engine.add_request(str(index), *REQUESTS[index], priority)
            logprobs[index] = engine.core.scheduler.requests[str(index)].output_logprobs  # grows with the answer
        for output in engine.step():
            index = int(output.request_id)
            results[index] = (output, logprobs[index])
    return results


def check(oracle: Oracle, results) -> None:
    differences = []
    for index, (output, logprobs) in results.items():
        params = REQUESTS[index][1]
        assert output.finished and output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == params.max_tokens
        differences.append(check_answer(oracle, output, params, logprobs))
    print(f"largest difference of a log-probability: {max(differences):.1e}")
    assert max(differences) < LOGPROB_BOUND


VARIANTS = {
    "batch": {},
    "synchronous": {"max_steps_in_flight": 1},
    "three steps in flight": {"max_steps_in_flight": 3},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "few seats": {"max_num_seqs": 5, "block_size": 32},
    "preempted": {"num_gpu_blocks_override": 25},
    "preempted, synchronous": {"num_gpu_blocks_override": 25, "max_steps_in_flight": 1},
    "preempted, tensor parallel, in chunks": {
        "num_gpu_blocks_override": 20,
        "tensor_parallel_size": 3,
        "max_num_batched_tokens": 24,
    },
    "priority, preempted": {"num_gpu_blocks_override": 25, "scheduling_policy": "priority"},
    "shortest first, preempted, least progress": {
        "num_gpu_blocks_override": 25,
        "scheduling_policy": "sjf",
        "preemption_victim": "least_progress",
        "long_prefill_token_threshold": 24,
    },
    "dynamic, few seats": {"scheduling_policy": "dynamic", "max_num_seqs": 5, "block_size": 32},
    "compiled when met": {"enforce_eager": True},
    "several steps a call": {"num_scheduler_steps": 4},
    "several steps a call, preempted": {"num_scheduler_steps": 3, "num_gpu_blocks_override": 25},
}


SLOW = ("synchronous", "few seats", "several steps a call", "preempted, synchronous", "priority, preempted")
"""Each compiles an engine of its own; what they vary, others that run always vary, too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VARIANTS])
def test_batches(name, folder, oracle):
    options = {"max_num_seqs": 16, "max_model_len": CONTEXT} | VARIANTS[name]
    with LLMEngine(str(folder), dtype="float32", **options) as engine:
        check(oracle, run(engine, range(NUM_REQUESTS)))
        check(oracle, run(engine, reversed(range(NUM_REQUESTS)), stagger=True))
        scheduler = engine.core.scheduler
        assert ("preempted" in name) == (scheduler.num_preemptions > 10)
        assert scheduler.kv.num_used_blocks == 0
        assert ("several" in name) == (engine.core.runner.counts.steps > engine.core.runner.counts.calls)
        if name == "batch":
            for index in range(NUM_REQUESTS):
                check(oracle, run(engine, [index]))


def test_bfloat16_runs_and_stays_near(folder, oracle):
    with LLMEngine(str(folder), dtype="bfloat16", max_num_seqs=16) as engine:
        for index, (output, logprobs) in run(engine, range(0, NUM_REQUESTS, 2)).items():
            prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
            exact = oracle.logits(prompt + answer)[len(prompt) - 1 : -1]
            best = exact.max(-1) - exact[range(len(answer)), answer]
            penalty = REQUESTS[index][1].repetition_penalty
            assert penalty != 1 or best.max() < 1.0, "a token far from the best"
            assert len(logprobs) == len(answer)
