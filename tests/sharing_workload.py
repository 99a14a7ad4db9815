"""Requests that share beginnings, what they have to get, and a loop that runs them.

Prompts are of two families that begin alike, half of the requests are greedy and half sampled under a seed, with
and without penalties, which have to know of tokens that were not computed for the request.
"""

import dataclasses
import random

import numpy as np
from tiny_model import CONTEXT, VOCAB, Oracle, check_answer, make_params

from jaxllm import LLMEngine, SamplingParams
from jaxllm.outputs import RequestOutput

LOGPROB_BOUND = 1e-4
LENGTHS = (40, 47, 48, 49, 64, 33, 90, 17)
"""Around the ends of blocks of 16."""
NUM_TOKENS = 20

type Requests = list[tuple[list[int], SamplingParams]]
type Answer = tuple[RequestOutput, list[float]]


def make_requests(n: int = 1) -> Requests:
    rng = random.Random(5)
    families = [[rng.randrange(VOCAB) for _ in range(CONTEXT)] for _ in range(2)]
    requests: Requests = []
    for index, length in enumerate(LENGTHS):
        own = [rng.randrange(VOCAB) for _ in range(index % 3)]
        params = dataclasses.replace(make_params(index, NUM_TOKENS), n=n)
        requests.append((families[index // 4][: length - len(own)] + own, params))
    return requests


class RememberingOracle(Oracle):
    """Most variants give the same answers, which are computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, token_ids: list[int]) -> np.ndarray:
        key = tuple(token_ids)
        if key not in self.remembered:
            self.remembered[key] = super().logits(token_ids)
        return self.remembered[key]


def run(engine: LLMEngine, requests: Requests) -> list[list[Answer]]:
    """For every request its answers, each with its log-probabilities."""
    answers: dict[tuple[int, int], Answer] = {}
    for number, request in enumerate(requests):
        engine.add_request(str(number), *request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            for answer in output.outputs:
                place = int(output.request_id), answer.index
                _, logprobs = answers.setdefault(place, (output, []))
                if len(answer.token_ids) > len(logprobs):
                    logprobs = [*logprobs, answer.cumulative_logprob - sum(logprobs)]
                answers[place] = dataclasses.replace(output, outputs=[answer]), logprobs
    return [[answers[number, index] for index in range(params.n)] for number, (_, params) in enumerate(requests)]


def check(oracle: Oracle, requests: Requests, answers: list[list[Answer]]) -> None:
    """Answer i is what a request with seed + i alone has to get."""
    for (prompt, params), found in zip(requests, answers, strict=True):
        for index, (output, logprobs) in enumerate(found):
            assert output.prompt_token_ids == prompt and output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].token_ids) == len(logprobs) == params.max_tokens
            seed = None if params.seed is None else params.seed + index
            difference = check_answer(oracle, output, dataclasses.replace(params, seed=seed), logprobs)
            assert difference < LOGPROB_BOUND
