"""The equivalence suite on each family: what a request gets does not depend on what the engine does around it.

The tiny checkpoints have no tokenizer, so the engine's core is driven directly. Six requests, half of them
greedy and half sampled under a seed, run alone and then together, in chunks, preempted and on two devices.
"""

import dataclasses
import random

import jax.numpy as jnp
import numpy as np
import pytest
from test_families_logits import FAMILIES, QUICK, TINY

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.kernels.gumbel import gumbel
from jaxllm.memory import CacheSize
from jaxllm.models.checkpoint import open_checkpoint
from jaxllm.models.loader import load_params
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.partition import split_over
from jaxllm.request import FinishReason, Request
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.scheduler import Scheduler, StepLimits

VOCAB, CONTEXT, BLOCK_SIZE = 256, 96, 8
PROMPTS = [70, 1, 5, 31, 47, 13]
"""Lengths: on both sides of the windows (8 to 12 tokens), of a block and of a chunk."""
ANSWERS = [21, 24, 20, 17, 14, 10]
LOGPROB_BOUND = 1e-4
CLOSE = 1e-3
"""Where the scores of two tokens (perturbed ones where they are sampled) are closer than this, either may come."""
MAX_UNCOMPARED = 0.05
"""Share of all positions that may lie after a close call."""
BASE = {"max_model_len": CONTEXT, "block_size": BLOCK_SIZE, "max_num_seqs": 4, "max_num_batched_tokens": 32}
FEW_BLOCKS = CONTEXT // BLOCK_SIZE + 1
QUICK_FAMILIES = ["gemma3", "olmo2"]
"""Compiling takes all of the time. Between them they have most of what families differ in."""


def start(name, **options) -> ModelRunner:
    folder = TINY / name
    config = EngineConfig(str(folder), dtype="float32", compilation_cache=False, **BASE | options)
    mesh = make_mesh(config)
    with open_checkpoint(folder) as checkpoint:
        model = checkpoint.config
        assert model.vocab_size == VOCAB
        on_mesh = split_over(model, config.tensor_parallel_size)
        runner = ModelRunner(config.resolve(on_mesh, "cpu"), on_mesh, mesh)
        runner.executables.compiler_options = QUICK
        runner.start(lambda specs: load_params(checkpoint, specs, progress=False), progress=False)
    return runner


def make_request(index) -> Request:
    """Every other one is greedy."""
    rng = random.Random(index)
    prompt = tuple(rng.randrange(VOCAB) for _ in range(PROMPTS[index]))
    sampling = {"temperature": 0.8, "top_k": 20, "seed": 1000 + index} if index % 2 else {"temperature": 0}
    params = SamplingParams(max_tokens=ANSWERS[index], ignore_eos=True, **sampling)
    return Request(str(index), prompt, params, frozenset(), PROMPTS[index] + ANSWERS[index], params.seed or 0)


def run(core, indices) -> list[Request]:
    requests = [make_request(index) for index in indices]
    for request in requests:
        core.add_request(request)
    while core.has_unfinished:
        core.step()
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        assert len(request.output_ids) == len(request.output_logprobs) == request.params.max_tokens
    assert core.scheduler.kv.num_used_blocks == 0
    return requests


def get_noise(request, position) -> np.ndarray:
    """What to add to the log-probabilities of the tokens at `position` of the answer: the largest sum is chosen."""
    if request.params.greedy:
        return np.zeros(VOCAB)
    key = jnp.asarray([[request.seed >> 32, request.seed & 0xFFFFFFFF]], jnp.uint32)
    noise = gumbel(key, jnp.asarray([request.prompt_len + position]), VOCAB)
    return np.asarray(noise[0]) * request.params.temperature


def compare(found, expected) -> tuple[int, float]:
    """Positions that were compared, up to a close call, and the largest difference of a log-probability there."""
    pairs = zip(found.output_ids, expected.output_ids, strict=True)
    count = next((at for at, (one, other) in enumerate(pairs) if one != other), len(found.output_ids))
    difference = np.abs(np.subtract(found.output_logprobs[:count], expected.output_logprobs[:count])).max(initial=0)
    if count < len(found.output_ids):
        noise = get_noise(found, count)
        one, other = (answer.output_logprobs[count] + noise[answer.output_ids[count]] for answer in (found, expected))
        message = f"request {found.request_id}: other tokens from {count} on, whose scores are {one} and {other}"
        assert abs(one - other) < CLOSE, message
    return count, float(difference)


def check(label, core, expected) -> None:
    found = run(core, range(len(PROMPTS)))
    counts, differences = zip(*map(compare, found, expected), strict=True)
    uncompared = 1 - sum(counts) / sum(ANSWERS)
    print(f"{label}: largest difference of a log-probability {max(differences):.1e},", end=" ")
    print(f"{core.scheduler.num_preemptions} preemptions, {uncompared:.1%} of the positions after a close call")
    assert max(differences) < LOGPROB_BOUND
    assert uncompared < MAX_UNCOMPARED


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK_FAMILIES else pytest.mark.slow) for name in FAMILIES]
)
def test_answers_are_those_of_the_request_alone(name):
    runner = start(name)
    core = EngineCore(runner)
    expected = [run(core, [index])[0] for index in range(len(PROMPTS))]
    check(f"{name}, batch", core, expected)
    assert core.scheduler.num_preemptions == 0

    # The compiled steps are the same ones: only the scheduler has a smaller budget and fewer blocks.
    runner.config = dataclasses.replace(runner.config, max_steps_in_flight=1)
    core.scheduler = Scheduler(StepLimits(BASE["max_num_seqs"], 16), CacheSize(FEW_BLOCKS, BLOCK_SIZE))
    check(f"{name}, preempted, synchronous, in chunks", core, expected)
    assert core.scheduler.num_preemptions > 0
    core.close()

    core = EngineCore(start(name, tensor_parallel_size=2))
    check(f"{name}, tensor parallel", core, expected)
    core.close()
