"""The bytes of stream events: those of a template are those of the value, for every text and option."""

from __future__ import annotations

import itertools
import json

import pytest
from fake_async_llm import FakeAsyncLLM
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.serving.api_chat import ChatWriter
from jaxllm.serving.api_completions import CompletionWriter
from jaxllm.serving.protocol_chat import ChatCompletionRequest
from jaxllm.serving.protocol_completions import CompletionRequest
from jaxllm.serving.server_settings import ServerSettings
from jaxllm.serving.service import Service
from jaxllm.serving.streaming import event
from jaxllm.serving.usage import UsageCounter

NAME = 'a "model" \\u0000 \0 ü'
"""With everything in it that a template could take for the place of its text."""
TEXTS = st.lists(st.text(min_size=1), min_size=1, max_size=4)
OPTIONS = (
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"n": 2},
)


@pytest.fixture(scope="module")
def service():
    return Service(FakeAsyncLLM(), NAME, ServerSettings())


def make_completion_writer(service, **options):
    body = CompletionRequest.model_validate({"prompt": "x", "stream": True} | options)
    return CompletionWriter(service, "cmpl-1", body, None)


def make_chat_writer(service, **options):
    messages = [{"role": "user", "content": "x"}]
    body = ChatCompletionRequest.model_validate({"messages": messages, "stream": True} | options)
    return ChatWriter(service, "chatcmpl-1", body)


MAKERS = {
    "completion": make_completion_writer,
    "completion with logprobs": lambda service, **options: make_completion_writer(service, logprobs=1, **options),
    "chat": make_chat_writer,
    "chat with logprobs": lambda service, **options: make_chat_writer(service, logprobs=True, **options),
}


def outputs_of(texts, num_answers):
    """Outputs as the engine gives them: an empty text (half a character) in between, the last one finished."""
    for place, text in enumerate([*texts[:1], "", *texts[1:], "end"]):
        parts = [
            CompletionOutput(
                index, text, [65], -1.0, "stop" if text == "end" else None, None, [{65: Logprob(-1.0, 1, "A")}]
            )
            for index in range(num_answers)
        ]
        whole = [[part] for part in parts] if place % 2 else [parts]  # together and one by one
        for some in whole:
            yield RequestOutput("1", "x", [1, 2], some, text == "end")


@pytest.mark.parametrize("maker", MAKERS)
@given(texts=TEXTS)
def test_an_event_is_its_value_encoded(service, maker, texts):
    for options in OPTIONS:
        writer, plain = (MAKERS[maker](service, **options) for _ in range(2))
        plain._head = writer._head  # the same second
        counters = UsageCounter(), UsageCounter()
        streamed: dict[int, str] = {}
        for output in outputs_of(texts, options.get("n", 1)):
            for counter in counters:
                counter.note(0, output)
            part = writer.part(0, output, counters[0])
            chunk = plain.chunk(0, output, counters[1])
            assert part == (None if chunk is None else event(chunk))
            for choice in json.loads(part.removeprefix(b"data: "))["choices"] if part else ():
                text = choice["text"] if "text" in choice else choice["delta"]["content"]
                streamed[choice["index"]] = streamed.get(choice["index"], "") + text
        assert streamed == dict.fromkeys(range(options.get("n", 1)), "".join([*texts, "end"]))


def test_the_bytes_of_a_stream(service):
    """Clients are known to look for these very bytes; a change of an encoder would show here."""
    chat = make_chat_writer(service)
    chat._head = {"id": "chatcmpl-1", "created": 5, "model": "m", "system_fingerprint": "f"}
    outputs = itertools.islice(outputs_of(["é\n", '"<'], 1), 4)
    parts = [chat.part(0, output, UsageCounter()) for output in outputs]
    head = '{"id":"chatcmpl-1","created":5,"model":"m","system_fingerprint":"f","object":"chat.completion.chunk","choices":'
    choices = (
        '[{"index":0,"delta":{"role":"assistant","content":"é\\n"},"logprobs":null,"finish_reason":null}]',
        None,
        '[{"index":0,"delta":{"content":"\\"<"},"logprobs":null,"finish_reason":null}]',
        '[{"index":0,"delta":{"content":"end"},"logprobs":null,"finish_reason":"stop","stop_reason":null}]',
    )
    assert parts == [one and f"data: {head}{one}}}\n\n".encode() for one in choices]
