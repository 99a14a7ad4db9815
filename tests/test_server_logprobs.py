"""Log-probabilities of the whole vocabulary over HTTP, from a fake engine whose vocabulary is the 256 bytes."""

import httpx2
import pytest
from fake_async_llm import FakeAsyncLLM
from server_process import events, fake_server

TOKENS = 256


@pytest.fixture(scope="module")
def server():
    with fake_server(FakeAsyncLLM(max_logprobs=-1)) as made:
        yield made


def complete(server, **body):
    return httpx2.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "seed": 0, "max_tokens": 3} | body)


def check(told, num_tokens, first=0):
    """Each token is told with all others, itself first and the rest in the order of their ranks."""
    assert [len(told[name]) for name in told] == [num_tokens] * 4
    for logprob, top in zip(told["token_logprobs"][first:], told["top_logprobs"][first:], strict=True):
        values = list(top.values())
        assert len(top) == TOKENS and values[0] == logprob == -0.5
        assert values[1:] == [-0.25, *(-0.25 * rank for rank in range(3, TOKENS + 1))]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_tell_all_tokens(server, stream):
    response = complete(server, logprobs=-1, stream=stream)
    chunks = events(response) if stream else [response.json()]
    told = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            told[name] += values
    check(told, 3)


def test_completions_tell_all_tokens_of_an_echoed_prompt(server):
    (choice,) = complete(server, logprobs=-1, echo=True, max_tokens=2).json()["choices"]
    assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
    check(choice["logprobs"], 4, first=1)


def test_a_limit_refuses_it_by_name():
    with fake_server() as server:
        response = complete(server, logprobs=-1)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "logprobs" and "max_logprobs" in error["message"], error
        assert complete(server, logprobs=-2).json()["error"]["param"] == "logprobs"
