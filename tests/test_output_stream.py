"""`OutputStream`: what a caller gets who reads at any pace."""

from __future__ import annotations

import asyncio
import random

import pytest

from jaxllm.engine.output_stream import MOST_QUEUED, OutputStream
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimes
from jaxllm.request import Request
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, _ = RequestOutputKind
PROMPT_LOGPROBS = [None, {7: Logprob(-1.0, 1)}]


def make_stream(kind=DELTA):
    request = Request("a-0", (1, 2), SamplingParams(output_kind=kind), frozenset(), 99, 0)
    return OutputStream("a", request, RequestTimes(0.0, 1.0, 2.0))


def delta(index, number, *, ends=False, logprobs=True):
    """The part of an answer that has this token."""
    told = [{number: Logprob(-number, 1)}] if logprobs else None
    return CompletionOutput(index, f"{index}:{number} ", [number], -number, "length" if ends else None, None, told)


def outputs_of(num_answers, num_tokens, rng):
    """Outputs that bring a token of some of the answers each, until all are finished."""
    left = {index: iter(range(num_tokens)) for index in range(num_answers)}
    while left:
        some = rng.sample(sorted(left), rng.randint(1, len(left)))
        parts = [
            delta(index, number, ends=number == num_tokens - 1) for index in some for number in [next(left[index])]
        ]
        for part in parts:
            if part.finish_reason:
                del left[part.index]
        yield RequestOutput("a-0", "p", [1, 2], parts, not left, 3)


async def read_at_some_pace(stream, outputs, rng, share):
    """Reads after some of the outputs; the rest at the end."""
    got = []
    for output in outputs:
        stream.times.last_token_time = output.outputs[0].token_ids[0]
        stream.put(output)
        if rng.random() < share:
            got.append(await stream.get())
    while not got or not got[-1].finished:
        got.append(await stream.get())
    return got


@pytest.mark.parametrize("num_answers", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_nothing_of_a_delta_is_lost(num_answers, share):
    rng = random.Random(num_answers + 10 * share)
    num_tokens = 3 * MOST_QUEUED
    outputs = list(outputs_of(num_answers, num_tokens, rng))
    outputs[0].prompt_logprobs = PROMPT_LOGPROBS
    num_outputs = len(outputs)
    got = asyncio.run(read_at_some_pace(make_stream(), outputs, rng, share))
    if share == 0:
        assert len(got) == 1, "what waits is one output"
    if share == 1:
        assert len(got) == num_outputs, "what is asked for at once is not held"
    for index in range(num_answers):
        parts = [part for output in got for part in output.outputs if part.index == index]
        tokens = [token for part in parts for token in part.token_ids]
        assert tokens == list(range(num_tokens))
        assert "".join(part.text for part in parts) == "".join(f"{index}:{token} " for token in tokens)
        assert [next(iter(one)) for part in parts for one in part.logprobs] == tokens
        assert [part.cumulative_logprob for part in parts] == [-part.token_ids[-1] for part in parts]
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert [output.prompt_logprobs for output in got] == [PROMPT_LOGPROBS] + [None] * (len(got) - 1)
    assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
    assert all((output.request_id, output.prompt, output.num_cached_tokens) == ("a", "p", 3) for output in got)
    assert got[-1].metrics == RequestTimes(0.0, 1.0, 2.0, num_tokens - 1)
    assert len({id(output.metrics) for output in got}) == len(got), "each has times of its own"


def test_without_log_probabilities_there_are_none():
    stream = make_stream()
    for number in range(3):
        stream.put(RequestOutput("a-0", None, [1], [delta(0, number, logprobs=False)]))
    (part,) = asyncio.run(stream.get()).outputs
    assert (part.token_ids, part.logprobs) == ([0, 1, 2], None)


def test_of_cumulative_outputs_the_newest_is_kept():
    stream = make_stream(CUMULATIVE)
    texts = ["a", "ab", "abc"]
    for text in texts:
        stream.put(RequestOutput("a-0", None, [1], [CompletionOutput(0, text, [1] * len(text), 0.0)]))
    assert asyncio.run(stream.get()).outputs[0].text == "abc"


def test_an_error_comes_after_what_came_before():
    async def read():
        stream = make_stream()
        stream.put(RequestOutput("a-0", None, [1], [delta(0, 0)]))
        stream.fail(ValueError("it broke"))
        assert (await stream.get()).outputs[0].token_ids == [0]
        for _ in range(2):
            with pytest.raises(ValueError, match="it broke"):
                await stream.get()

    asyncio.run(read())


def test_a_caller_that_is_cancelled_loses_nothing():
    async def read():
        stream = make_stream()
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.put(RequestOutput("a-0", None, [1], [delta(0, 0)]))
        waiting.cancel()  # it has been woken, but did not run yet
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stream.put(RequestOutput("a-0", None, [1], [delta(0, 1)]))
        assert (await stream.get()).outputs[0].token_ids == [0, 1]

    asyncio.run(read())
