"""The routes of the server over a fake engine: requests, responses, streams, errors."""

import json

import httpx2
import openai
import pytest
from fake_async_llm import FakeAsyncLLM, fake_text
from pydantic import TypeAdapter
from server_process import events, fake_server

from jaxllm.serving.protocol_chat import ChatCompletion, ChatCompletionChunk
from jaxllm.serving.protocol_completions import Completion

MESSAGES = [{"role": "user", "content": "Hi"}]
PROMPT = "<user>Hi</user>\n<assistant>"
"""What the template makes of them."""


@pytest.fixture(scope="module")
def server():
    with fake_server() as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server, path, **body):
    return httpx2.post(server.url + path, json=body)


def chat(server, **body):
    return post(server, "/v1/chat/completions", **{"messages": MESSAGES, "seed": 0, "max_tokens": 8} | body)


def complete(server, **body):
    return post(server, "/v1/completions", **{"prompt": "Hello", "seed": 0, "max_tokens": 8} | body)


def assert_error(response, status, param=None, **detail):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    for name, value in detail.items():
        assert error[name] == value
    return error["message"]


def test_a_chat_answer(server):
    response = chat(server)
    body = TypeAdapter(ChatCompletion).validate_python(response.json(), extra="forbid")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": fake_text(PROMPT, 8), "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 8,
        "total_tokens": len(PROMPT) + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["model"] == "fake-model"
    assert body["id"].startswith("chatcmpl-")


def test_a_chat_stream(server):
    chunks = [
        TypeAdapter(ChatCompletionChunk).validate_python(one, extra="forbid")
        for one in events(chat(server, stream=True, max_tokens=60))
    ]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("role" in one["choices"][0]["delta"] for one in chunks[1:])
    text = "".join(one["choices"][0]["delta"]["content"] for one in chunks)
    assert text == fake_text(PROMPT, 60)
    assert [one["choices"][0]["finish_reason"] for one in chunks[-2:]] == [None, "length"]
    assert len({one["id"] for one in chunks}) == 1
    assert not any("usage" in one for one in chunks)


def test_the_usage_of_a_stream(server):
    chunks = events(chat(server, stream=True, stream_options={"include_usage": True}))
    assert all(one["usage"] is None for one in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chat(server).json()["usage"]
    chunks = events(chat(server, stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [one["usage"]["completion_tokens"] for one in chunks]
    assert counts[:4] == [1, 2, 3, 4]
    assert counts[-1] == 8


def test_the_usage_can_be_forced():
    with fake_server(enable_force_include_usage=True) as server:
        assert events(chat(server, stream=True))[-1]["usage"]["completion_tokens"] == 8


def test_several_answers(server):
    body = chat(server, n=3).json()
    assert [one["index"] for one in body["choices"]] == [0, 1, 2]
    expected = [fake_text(PROMPT, 8, seed) for seed in range(3)]
    assert [one["message"]["content"] for one in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["completion_tokens"] == 24
    texts = ["", "", ""]
    for chunk in events(chat(server, n=3, stream=True)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"]["content"]
    assert texts == expected


def test_stop_strings_and_stop_tokens(server):
    whole = fake_text(PROMPT, 30)
    (choice,) = chat(server, stop=[whole[10:13]], max_tokens=40).json()["choices"]
    assert choice["message"]["content"] == whole[:10]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", whole[10:13])
    (choice,) = chat(server, stop_token_ids=[ord(whole[5])]).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord(whole[5]))


def test_completions(server):
    body = TypeAdapter(Completion).validate_python(complete(server).json(), extra="forbid")
    assert body["choices"] == [
        {"index": 0, "text": fake_text("Hello", 8), "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["id"].startswith("cmpl-")
    text = "".join(one["choices"][0]["text"] for one in events(complete(server, stream=True)))
    assert text == fake_text("Hello", 8)
    assert complete(server, max_tokens=None).json()["usage"]["total_tokens"] == 160


def test_every_form_of_prompt(server):
    expected = [fake_text("Hello", 8), fake_text("Bye", 8)]
    for prompt in (["Hello", "Bye"], [server.engine.tokenizer.encode(text) for text in ("Hello", "Bye")]):
        body = complete(server, prompt=prompt).json()
        assert [one["text"] for one in body["choices"]] == expected
        texts = ["", ""]
        for chunk in events(complete(server, prompt=prompt, stream=True)):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == expected
    assert complete(server, prompt=server.engine.tokenizer.encode("Hello")).json()["choices"][0]["text"] == expected[0]
    body = complete(server, prompt=["Hello", "Bye"], n=2).json()
    assert [one["text"] for one in body["choices"]] == [fake_text(p, 8, s) for p in ("Hello", "Bye") for s in (0, 1)]


def test_echo(server):
    assert complete(server, echo=True).json()["choices"][0]["text"] == "Hello" + fake_text("Hello", 8)
    tokens = server.engine.tokenizer.encode("Hello")
    chunks = events(complete(server, echo=True, prompt=tokens, stream=True))
    assert "".join(one["choices"][0]["text"] for one in chunks) == "Hello" + fake_text("Hello", 8)


def test_only_the_prompt_is_echoed(server):
    body = complete(server, echo=True, max_tokens=0).json()
    assert body["choices"][0]["text"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert_error(complete(server, max_tokens=0), 400, "max_tokens")


def test_token_ids(server):
    (choice,) = chat(server, return_token_ids=True).json()["choices"]
    assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]
    chunks = events(complete(server, return_token_ids=True, stream=True, max_tokens=60))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == server.engine.tokenizer.encode("Hello")
    ids = [token for one in chunks for token in one["choices"][0]["token_ids"]]
    assert bytes(ids).decode(errors="replace") == fake_text("Hello", 60)


def test_chat_logprobs(server):
    (choice,) = chat(server, logprobs=True, top_logprobs=2, max_tokens=60).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 60
    assert bytes(byte for one in entries for byte in one["bytes"]).decode(errors="replace") == fake_text(PROMPT, 60)
    assert all(one["logprob"] == -0.5 for one in entries)
    assert all([top["logprob"] for top in one["top_logprobs"]] == [-0.25, -0.5] for one in entries)
    assert any(one["token"].startswith("bytes:\\x") for one in entries)
    chunks = events(chat(server, logprobs=True, top_logprobs=2, max_tokens=60, stream=True))
    assert [one for chunk in chunks for one in chunk["choices"][0]["logprobs"]["content"]] == entries
    (choice,) = chat(server, logprobs=True).json()["choices"]
    assert all(one["top_logprobs"] == [] for one in choice["logprobs"]["content"])


def test_completion_logprobs(server):
    (choice,) = complete(server, logprobs=1, max_tokens=60).json()["choices"]
    told, text = choice["logprobs"], choice["text"]
    assert [len(told[name]) for name in told] == [60] * 4
    assert told["token_logprobs"] == [-0.5] * 60
    assert [list(one.values()) for one in told["top_logprobs"]] == [[-0.5, -0.25]] * 60
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].lstrip("\ufffd").startswith(token)
    chunks = events(complete(server, logprobs=1, max_tokens=60, stream=True))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [one for part in streamed for one in part[name]] for name in told} == told
    (choice,) = complete(server, logprobs=0).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{}] * 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_the_log_probabilities_of_a_prompt(server, stream, max_tokens):
    """What harnesses score texts with."""
    tokens = server.engine.tokenizer.encode("né you")
    response = complete(server, prompt=tokens, echo=True, logprobs=1, max_tokens=max_tokens, stream=stream)
    chunks = events(response) if stream else [response.json()]
    told = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            told[name] += values
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith("né you")
    assert told["token_logprobs"] == [None, *[-0.5] * (len(tokens) + max_tokens - 1)]
    assert told["top_logprobs"][0] is None
    assert told["text_offset"][:4] == [0, 1, 2, 3]
    assert len(told["tokens"]) == len(tokens) + max_tokens


def test_vllms_prompt_logprobs(server):
    tokens = server.engine.tokenizer.encode("Hello")
    (choice,) = complete(server, prompt_logprobs=1).json()["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(tokens[1])]["logprob"] == -0.5
    assert chat(server, prompt_logprobs=0).json()["prompt_logprobs"][0] is None
    assert_error(chat(server, prompt_logprobs=1, stream=True), 400, "prompt_logprobs")


def test_the_ids_of_requests(server):
    response = httpx2.post(
        f"{server.url}/v1/completions",
        json={"prompt": "Hello", "request_id": "mine"},
        headers={"X-Request-Id": "of-the-proxy"},
    )
    assert response.json()["id"] == "cmpl-mine"
    assert response.headers["x-request-id"] == "of-the-proxy"
    forged = httpx2.get(f"{server.url}/version", headers={"X-Request-Id": "two words"})
    assert len(forged.headers["x-request-id"]) == 32


def test_chat_templates(server):
    def content(**body):
        return post(server, "/tokenize", messages=MESSAGES, **body).json()["tokens"]

    encode = server.engine.tokenizer.encode
    assert content() == encode(PROMPT)
    assert content(add_generation_prompt=False) == encode(PROMPT.removesuffix("<assistant>"))
    assert content(chat_template_kwargs={"suffix": "!"}) == encode(PROMPT + "!")
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    tokens = post(server, "/tokenize", messages=parts).json()["tokens"]
    assert tokens == encode("<system>a\nb</system>\n<assistant>")
    continued = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    body = {"messages": continued, "continue_final_message": True, "add_generation_prompt": False}
    assert post(server, "/tokenize", **body).json()["tokens"] == encode("<user>Hi</user>\n<assistant>Well, ")
    del body["add_generation_prompt"]
    assert_error(post(server, "/tokenize", **body), 400, "continue_final_message")
    assert_error(chat(server, chat_template="{{ messages }}"), 400, "chat_template")


def test_other_chat_templates(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}")
    settings = {"chat_template": str(template), "default_chat_template_kwargs": '{"mood": "calm"}'}
    with fake_server(trust_request_chat_template=True, **settings) as server:
        encode = server.engine.tokenizer.encode
        assert post(server, "/tokenize", messages=MESSAGES).json()["tokens"] == encode("[Hi]calm")
        tokens = post(server, "/tokenize", messages=MESSAGES, chat_template="{{ mood }}").json()["tokens"]
        assert tokens == encode("calm")


def test_tokenize_and_back(server):
    body = post(server, "/tokenize", prompt="你好 hello", return_token_strs=True).json()
    assert body["tokens"] == server.engine.tokenizer.encode("你好 hello")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 160
    assert post(server, "/detokenize", tokens=body["tokens"]).json() == {"prompt": "你好 hello"}
    assert_error(post(server, "/detokenize", tokens=[270]), 400, "tokens")
    assert_error(post(server, "/tokenize"), 400, "prompt")


def test_models(server):
    (card,) = httpx2.get(f"{server.url}/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["root"]) == ("fake-model", 160, "fake-model")
    with fake_server(served_model_name=("org/first", "second")) as named:
        ids = [one["id"] for one in httpx2.get(f"{named.url}/v1/models").json()["data"]]
        assert ids == ["org/first", "second"]
        assert httpx2.get(f"{named.url}/v1/models/org/first").json()["root"] == "fake-model"
        assert chat(named, model="second").json()["model"] == "org/first"
        assert_error(chat(named, model="fake-model"), 404, "model", code="model_not_found")
        assert_error(httpx2.get(f"{named.url}/v1/models/other"), 404, "model")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"frequency": 1}, "frequency"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"priority": 3}, "priority"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
def test_a_wrong_field_is_named(server, body, param):
    response = chat(server, **body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] is not None, error
    assert error["param"].startswith(param), error
    assert param.split("[")[0] in error["message"]


def test_values_that_ask_for_nothing_are_no_mistake(server):
    body = {"tools": None, "response_format": {"type": "text"}, "tool_choice": "none", "store": False, "stop": None}
    message = {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": None}
    assert chat(server, messages=[*MESSAGES, message, *MESSAGES], **body).status_code == 200
    assert_error(chat(server, user_id=None), 400, "user_id")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"messages": NaN}', b"\xff", b'{"prompt": "\\ud800"}', b""])
def test_a_body_that_is_no_json_object(server, content):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert_error(httpx2.post(f"{server.url}/v1/completions", content=content, headers=headers), 400)


def test_a_prompt_that_is_too_long(server):
    message = assert_error(complete(server, prompt="x" * 200), 400, "prompt", code="context_length_exceeded")
    assert "160" in message
    assert "200" in message
    assert "at least 1500 tokens" in assert_error(complete(server, prompt="x" * 9000), 400, "prompt")
    long = [{"role": "user", "content": "x" * 9000}]
    assert_error(chat(server, messages=long), 400, "messages", code="context_length_exceeded")


def test_a_long_text_is_tokenized(server):
    """In a thread."""
    text = "né you " * 3000
    assert post(server, "/tokenize", prompt=text).json()["tokens"] == server.engine.tokenizer.encode(text)


def test_prompts_that_are_no_tokens(server):
    for prompt in ("", [], [[]], [270], [-1], ["a", 1], None):
        assert complete(server, prompt=prompt).status_code == 400, prompt


def test_an_unknown_route_and_a_wrong_method(server):
    assert_error(httpx2.get(f"{server.url}/v1/nothing"), 404)
    response = httpx2.get(f"{server.url}/v1/completions")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_the_openai_package(client):
    answer = client.chat.completions.create(model="fake-model", messages=MESSAGES, seed=0, max_completion_tokens=8)
    assert answer.choices[0].message.content == fake_text(PROMPT, 8)
    assert answer.usage.total_tokens == len(PROMPT) + 8
    again = [*MESSAGES, answer.choices[0].message, *MESSAGES]
    assert client.chat.completions.create(model="fake-model", messages=again).choices[0].finish_reason == "length"
    stream = client.chat.completions.create(model="fake-model", messages=MESSAGES, seed=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == fake_text(PROMPT, 8)
    assert client.models.list().data[0].id == "fake-model"
    assert client.models.retrieve("fake-model").id == "fake-model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.completions.create(model="fake-model", prompt="x" * 200)


def test_the_schema_describes_every_route(server):
    body = httpx2.get(f"{server.url}/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health", "/metrics"} <= body["paths"].keys()
    text = json.dumps(body)
    for name in ("ChatCompletionRequest", "CompletionRequest", "ChatCompletionChunk", "ErrorBody"):
        assert name in body["components"]["schemas"], text


def test_a_model_without_a_template():
    engine = FakeAsyncLLM()
    engine.tokenizer = type(engine.tokenizer)(engine.tokenizer.backend)
    with fake_server(engine) as server:
        assert "no chat template" in assert_error(chat(server), 400)
        assert complete(server).status_code == 200
