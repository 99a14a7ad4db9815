"""Gemma 3 270M against Hugging Face transformers: prompt ids, greedy tokens, log-probabilities.

Real weights of several quantisations, a SentencePiece vocabulary, and a prompt longer than the window of most
layers. scripts/make_gemma_golden.py made the values, by the rules of test_golden.py.
"""

import itertools
import json
from pathlib import Path

import pytest

from jaxllm import LLMEngine, SamplingParams
from jaxllm.models.hub import pull

GOLDEN = json.loads((Path(__file__).parent / "data" / "gemma3_greedy.json").read_text())["cases"]
CLOSE_CALL = 0.002
LOGPROB_BOUND = 1e-3
WINDOW = 512

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine():
    with LLMEngine(str(pull("gemma3-270m")), dtype="float32", max_model_len=1024) as engine:
        yield engine


def num_comparable(case) -> int:
    close = (position for position, gap in enumerate(case["top2_gap"]) if gap < CLOSE_CALL)
    return next(close, len(case["gen"]))


def run(engine: LLMEngine, case) -> tuple[list[int], list[float]]:
    """The answer to one prompt, and the log-probability of each of its tokens."""
    engine.add_request("0", case["prompt_ids"], SamplingParams(temperature=0, max_tokens=len(case["gen"])))
    token_ids, totals = [], [0.0]
    while engine.has_unfinished_requests():
        for output in engine.step():
            token_ids = output.outputs[0].token_ids
            totals.append(output.outputs[0].cumulative_logprob)
    return token_ids, [after - before for before, after in itertools.pairwise(totals)]


def test_prompt_ids_and_text(engine):
    for case in GOLDEN:
        assert engine.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert engine.tokenizer.decode(case["gen"], skip_special_tokens=False) == case["text"]
    assert max(len(case["prompt_ids"]) for case in GOLDEN) > WINDOW


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["prompt"][:24])
def test_tokens_and_logprobs(engine, case):
    token_ids, logprobs = run(engine, case)
    count = num_comparable(case)
    assert token_ids[:count] == case["gen"][:count]
    pairs = zip(logprobs[:count], case["logprobs"][:count], strict=True)
    worst = max(abs(ours - theirs) for ours, theirs in pairs)
    print(f"{count} tokens compared, largest difference of a log-probability {worst:.1e}")
    assert worst < LOGPROB_BOUND
