"""The demo model against Hugging Face transformers: prompt ids, greedy tokens, log-probabilities.

The values were computed in float32 with the same dequantised weights. Where the best two tokens are
nearer than 0.002 another order of summation may pick the other one; an answer is compared up to there.
"""

import itertools
import json
from pathlib import Path

import pytest

from jaxllm import LLMEngine, SamplingParams

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]
CLOSE_CALL = 0.002
LOGPROB_BOUND = 1e-3


@pytest.fixture(scope="module")
def engine(demo_model):
    with LLMEngine(str(demo_model), dtype="float32") as engine:
        yield engine


def tokenize(engine: LLMEngine, prompt) -> list[int]:
    """Text or chat messages to token ids."""
    if isinstance(prompt, str):
        return engine.tokenizer.encode(prompt)
    return engine.tokenizer.encode_chat(prompt)


def num_comparable(case) -> int:
    close = (position for position, gap in enumerate(case["top2_gap"]) if gap < CLOSE_CALL)
    return next(close, len(case["gen"]))


def test_prompt_ids(engine):
    for case in GOLDEN:
        assert tokenize(engine, case["prompt"]) == case["prompt_ids"]


def test_tokens_and_logprobs(engine):
    """All cases in one batch: nothing of it may depend on the neighbours."""
    for index, case in enumerate(GOLDEN):
        params = SamplingParams(temperature=0, max_tokens=len(case["gen"]))
        engine.add_request(str(index), tokenize(engine, case["prompt"]), params)
    totals: dict[str, list[float]] = {str(index): [0.0] for index in range(len(GOLDEN))}
    final = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            totals[output.request_id].append(output.outputs[0].cumulative_logprob)
            final[output.request_id] = output.outputs[0]
    worst = 0.0
    for index, case in enumerate(GOLDEN):
        count, steps = num_comparable(case), totals[str(index)]
        assert final[str(index)].token_ids[:count] == case["gen"][:count], case["prompt"]
        logprobs = [after - before for before, after in itertools.pairwise(steps)]
        pairs = zip(logprobs[:count], case["logprobs"][:count], strict=True)
        worst = max(worst, *(abs(ours - theirs) for ours, theirs in pairs))
    print(f"{sum(map(num_comparable, GOLDEN))} tokens compared, largest difference of a log-probability {worst:.1e}")
    assert worst < LOGPROB_BOUND
