"""Several answers to one prompt: which outputs a caller gets to see, for each kind of output."""

from __future__ import annotations

import tracemalloc

import pytest
from toy_tokenizers import byte_level

from jaxllm.engine.answer_groups import AnswerGroups
from jaxllm.engine.answers import Answers
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.request import Request
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def make_groups(kind: RequestOutputKind = CUMULATIVE) -> AnswerGroups:
    groups = AnswerGroups()
    request = Request("a", (1, 2), SamplingParams(n=3, output_kind=kind), frozenset(), 10, seed=0)
    request.fork({"1_a": 1, "2_a": 2})
    groups.add(request)
    return groups


def output(request_id: str, text: str, reason: str | None = None, cached: int = 0) -> RequestOutput:
    answer = CompletionOutput(0, text, [*text.encode()], -1.0, reason)
    return RequestOutput(request_id, "hi", [1, 2], [answer], reason is not None, cached)


def seen(outputs: list[RequestOutput]) -> list[tuple[str, list[tuple[int, str]], bool]]:
    return [(one.request_id, [(a.index, a.text) for a in one.outputs], one.finished) for one in outputs]


def test_outputs_of_other_requests_pass_through():
    other = output("b", "x")
    assert AnswerGroups().merge([other]) == [other]
    merged = make_groups().merge([output("1_a", "y"), other])
    assert merged[0] is other and merged[1].request_id == "a"


def test_cumulative_outputs_always_have_all_answers():
    groups = make_groups()
    first = groups.merge([output("a", "x", cached=1)])
    assert seen(first) == [("a", [(0, "x"), (1, ""), (2, "")], False)]
    assert seen(groups.merge([output("2_a", "z"), output("1_a", "y", "stop")])) == [
        ("a", [(0, "x"), (1, "y"), (2, "z")], False)
    ]
    groups.merge([output("a", "xx", "length", cached=1)])
    last = groups.merge([output("2_a", "zz", "length", cached=2)])
    assert seen(last) == [("a", [(0, "xx"), (1, "y"), (2, "zz")], True)]
    assert [answer.finish_reason for answer in last[0].outputs] == ["length", "stop", "length"]
    assert last[0].num_cached_tokens == 1 and last[0].prompt == "hi" and last[0].prompt_token_ids == [1, 2]
    assert seen(first) == [("a", [(0, "x"), (1, ""), (2, "")], False)], "what was seen does not change"
    assert "a" not in groups and groups.unfinished("a") == ["a"]


def test_deltas_are_of_the_answers_that_went_on():
    groups = make_groups(DELTA)
    assert seen(groups.merge([output("a", "x"), output("2_a", "z")])) == [("a", [(0, "x"), (2, "z")], False)]
    assert seen(groups.merge([output("1_a", "y")])) == [("a", [(1, "y")], False)]


def test_final_outputs_come_once_with_everything():
    groups = make_groups(FINAL_ONLY)
    assert groups.merge([output("1_a", "y", "stop"), output("a", "x", "stop")]) == []
    assert "a" in groups and groups.unfinished("a") == ["2_a"]
    assert seen(groups.merge([output("2_a", "z", "length")])) == [("a", [(0, "x"), (1, "y"), (2, "z")], True)]


def test_an_id_can_be_used_again_once_its_group_is_finished():
    groups = make_groups()
    groups.merge([output(member, "x", "abort") for member in groups.unfinished("a")])
    assert seen(groups.merge([output("1_a", "x")])) == [("1_a", [(0, "x")], False)]


@pytest.mark.parametrize("n", [0, -1, 1025, 1.5, True, None])
def test_the_number_of_answers_is_checked(n):
    with pytest.raises(ValueError, match=r"n=.* is not valid: use a whole number from 1 to 1024"):
        SamplingParams(n=n)


def test_many_answers_to_a_long_prompt_hold_it_once():
    request = Request("a", tuple(range(300, 20300)), SamplingParams(n=256), frozenset(), 30000, seed=0)
    request.fork({f"{index}_a": index for index in range(1, 256)})
    answers = Answers(byte_level())
    tracemalloc.start()
    answers.add(None, request)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 2e6, "a list of it takes 160 kB"
