"""Tensor parallelism changes no token: answers on 1 to 8 devices, held against the dense model.

One run has everything that moves K/V: preemption, swapping, prefix hits, forks, steps in flight, chunks. Two shapes: 8 query
and 2 K/V heads, which 4 and 8 devices share as copies; 9 and 3, which 2 devices share with places that stay empty.
"""

import dataclasses
import random
from functools import lru_cache

import pytest
import tiny_model
from test_families_logits import QUICK
from tiny_model import CONTEXT, VOCAB, Oracle, check_answer, make_params, write_model

from jaxllm import LLMEngine
from jaxllm.runner import host_memory, programs

LOGPROB_BOUND = 1e-4
NUM_TOKENS = 16
LENGTHS = (33, 47, 48, 21, 60, 17)
"""Of prompts; the even ones begin alike, and so do the others."""


class RememberingOracle(Oracle):
    """Every size has to give the same answers, which are computed once."""

    def __init__(self):
        super().__init__()
        self.remembered = {}

    def logits(self, token_ids):
        key = tuple(token_ids)
        if key not in self.remembered:
            self.remembered[key] = super().logits(token_ids)
        return self.remembered[key]


@lru_cache
def oracle_of(num_heads, num_kv_heads):
    """To be called while the tiny model has these heads."""
    assert (num_heads, num_kv_heads) == (tiny_model.HEADS, tiny_model.KV_HEADS)
    return RememberingOracle()


def make_requests():
    rng = random.Random(11)
    beginnings = [[rng.randrange(VOCAB) for _ in range(CONTEXT)] for _ in range(2)]
    for index, length in enumerate(LENGTHS):
        own = [rng.randrange(VOCAB) for _ in range(1 + index % 2)]
        prompt = beginnings[index % 2][: length - len(own)] + own
        yield prompt, dataclasses.replace(make_params(index, NUM_TOKENS), n=2 if index in (1, 2) else 1)


def run(engine, requests):
    """Log-probabilities and output of every answer, by request and number."""
    answers = {}
    for number, request in enumerate(requests):
        engine.add_request(str(number), *request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            for answer in output.outputs:
                key = int(output.request_id), answer.index
                _, logprobs = answers.setdefault(key, (output, []))
                if len(answer.token_ids) > len(logprobs):
                    logprobs = [*logprobs, answer.cumulative_logprob - sum(logprobs)]
                answers[key] = dataclasses.replace(output, outputs=[answer]), logprobs
    return answers


def check(oracle, requests, answers):
    assert len(answers) == sum(params.n for _, params in requests)
    differences = []
    for (number, index), (output, logprobs) in answers.items():
        params = requests[number][1]
        assert len(output.outputs[0].token_ids) == len(logprobs) == NUM_TOKENS
        seed = None if params.seed is None else params.seed + index
        differences.append(check_answer(oracle, output, dataclasses.replace(params, seed=seed), logprobs))
    print(f"largest difference of a log-probability: {max(differences):.1e}")
    assert max(differences) < LOGPROB_BOUND


OPTIONS = {
    "dtype": "float32",
    "max_model_len": CONTEXT,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 15,
    "preemption_mode": "swap",
    "swap_space": 0.01,
    "enforce_eager": True,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Compiling takes most of the time."""
    monkeypatch.setitem(programs.EAGER_OPTIONS, "cpu", QUICK)
    monkeypatch.setattr(host_memory, "CHUNK_TOKENS", 32)


@pytest.mark.parametrize(
    ("heads", "size", "places"),
    [
        pytest.param((8, 2), 1, (2, 4), marks=pytest.mark.slow),
        pytest.param((8, 2), 2, (2, 4), marks=pytest.mark.slow),
        pytest.param((8, 2), 4, (4, 2), marks=pytest.mark.slow),
        ((8, 2), 8, (8, 1)),
        ((9, 3), 2, (4, 3)),
    ],
)
def test_answers_do_not_depend_on_the_number_of_devices(heads, size, places, tmp_path, monkeypatch):
    """`places`: for K/V heads, and for query heads beside each."""
    monkeypatch.setattr(tiny_model, "HEADS", heads[0])
    monkeypatch.setattr(tiny_model, "KV_HEADS", heads[1])
    folder = write_model(tmp_path / "tiny", num_attention_heads=heads[0], num_key_value_heads=heads[1])
    requests = list(make_requests())
    with LLMEngine(str(folder), tensor_parallel_size=size, **OPTIONS) as engine:
        runner, scheduler = engine.core.runner, engine.core.scheduler
        assert runner.mesh.size == size
        assert (runner.model.num_kv_heads, runner.model.group_size) == places
        keys = runner.cache[0].keys
        assert keys.sharding.shard_shape(keys.shape)[2] == places[0] // size
        answers = [run(engine, requests), run(engine, requests)]
        assert scheduler.num_preemptions > 0 < runner.host.num_in
        assert scheduler.kv.stats().prefix_cache.hits > 0
        assert scheduler.kv.num_used_blocks == 0
        assert len({(device.weights, device.kv_cache, device.temp) for device in runner.memory_report()}) == 1
    for found in answers:
        check(oracle_of(*heads), requests, found)
