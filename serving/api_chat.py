"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.serving.answering import answer, new_id
from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.generation import Generation, get_timeout
from jaxllm.serving.logprobs import chat_logprobs, prompt_logprobs_body
from jaxllm.serving.prompts import encode_chat, text_of
from jaxllm.serving.protocol import Usage
from jaxllm.serving.protocol_chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
)
from jaxllm.serving.requests import read_request
from jaxllm.serving.sampling_fields import chat_params
from jaxllm.serving.service import Service
from jaxllm.serving.streaming import TextTemplate, event
from jaxllm.serving.usage import UsageCounter


async def create_chat_completion(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    body = await read_request(request, ChatCompletionRequest)
    service.check_model(body.model)
    params = chat_params(body, service.engine.config.max_logprobs)
    for message in body.messages:
        service.check_text(text_of(message), "messages")
    token_ids = await encode_chat(service, body)
    service.check_prompt(token_ids, "messages")
    request_id = new_id("chatcmpl", body.request_id)
    timeout = get_timeout(service, request)
    generation = Generation(service, request_id, [token_ids], params, body.cache_salt, body.priority or 0, timeout)
    return await answer(request, generation, ChatWriter(service, request_id, body), body)


class ChatWriter:
    """Makes the response, whole or in chunks."""

    def __init__(self, service: Service, request_id: str, body: ChatCompletionRequest) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._with_usage = body.include_usage or service.settings.enable_force_include_usage
        self._head = service.make_head(request_id)
        self._begun: set[int] = set()
        """Answers of which a chunk was made."""
        self._has_prompt_ids = False
        self._is_only_text = not (body.logprobs or body.return_token_ids or body.continuous_usage)
        """Between its first and its last chunk, an answer's bring nothing but text."""
        self._templates: dict[int, TextTemplate] = {}

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        (output,) = outputs
        answers = sorted(output.outputs, key=lambda one: one.index)
        made: ChatCompletion = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(one) for one in answers],
            "usage": usage,
        }
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs)
        if self._body.return_token_ids:
            made["prompt_token_ids"] = output.prompt_token_ids
        return made

    def part(self, index: int, output: RequestOutput, counter: UsageCounter) -> bytes | None:
        if self._is_only_text and len(output.outputs) == 1:
            (one,) = output.outputs
            if one.finish_reason is None and one.index in self._begun:
                return self._template(one.index).event(one.text) if one.text else None
        chunk = self.chunk(index, output, counter)
        return None if chunk is None else event(chunk)

    def chunk(self, index: int, output: RequestOutput, counter: UsageCounter) -> ChatCompletionChunk | None:
        choices = [self._delta(one) for one in output.outputs if self._is_shown(one)]
        if not choices:
            return None
        made = self._make_chunk(choices)
        if self._body.continuous_usage:
            made["usage"] = counter.usage
        if self._body.return_token_ids and not self._has_prompt_ids:
            self._has_prompt_ids = True
            made["prompt_token_ids"] = output.prompt_token_ids
        return made

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk | None:
        if not self._with_usage:
            return None
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _template(self, index: int) -> TextTemplate:
        """Of an answer that has begun and goes on."""
        found = self._templates.get(index)
        if found is None:
            choice = self._delta(CompletionOutput(index, TextTemplate.PLACE, [], 0.0))
            found = self._templates[index] = TextTemplate(self._make_chunk([choice]))
        return found

    def _make_chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        made: ChatCompletionChunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._with_usage:
            made["usage"] = None
        return made

    def _choice(self, one: CompletionOutput) -> ChatChoice:
        made: ChatChoice = {
            "index": one.index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": self._logprobs(one),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._body.return_token_ids:
            made["token_ids"] = list(one.token_ids)
        return made

    def _is_shown(self, one: CompletionOutput) -> bool:
        """Half a character is no reason for a chunk, unless tokens themselves are asked for."""
        has_tokens = bool(one.token_ids) and bool(self._body.logprobs or self._body.return_token_ids)
        return bool(one.text) or has_tokens or one.finish_reason is not None or one.index not in self._begun

    def _delta(self, one: CompletionOutput) -> ChatChunkChoice:
        made: ChatChunkChoice = {
            "index": one.index,
            "delta": {"content": one.text},
            "logprobs": self._logprobs(one),
            "finish_reason": one.finish_reason,
        }
        if one.index not in self._begun:
            self._begun.add(one.index)
            made["delta"] = {"role": "assistant", "content": one.text}
        if one.finish_reason is not None:
            made["stop_reason"] = one.stop_reason
        if self._body.return_token_ids:
            made["token_ids"] = list(one.token_ids)
        return made

    def _logprobs(self, one: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs or one.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, one.token_ids, one.logprobs, self._body.top_logprobs or 0)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation.",
        request=ChatCompletionRequest,
        response=ChatCompletion,
        chunk=ChatCompletionChunk,
        statuses=(404, 429, 504),
    ),
)
