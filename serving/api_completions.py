"""/v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm.engine.detokenizer import TextVocabulary
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.serving.answering import answer, new_id
from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.generation import Generation, get_timeout
from jaxllm.serving.logprobs import CompletionLogprobsWriter, TokenLogprobs, prompt_logprobs_body
from jaxllm.serving.prompts import as_prompts, encode_prompts
from jaxllm.serving.protocol import Usage
from jaxllm.serving.protocol_completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from jaxllm.serving.requests import read_request
from jaxllm.serving.sampling_fields import completion_params
from jaxllm.serving.service import Service
from jaxllm.serving.streaming import TextTemplate, event
from jaxllm.serving.usage import UsageCounter


async def create_completion(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    body = await read_request(request, CompletionRequest)
    service.check_model(body.model)
    params = completion_params(body)
    given = as_prompts(body.prompt)
    service.admission.check_size(len(given) * params.n)
    prompts = await encode_prompts(service, given, body.add_special_tokens)
    request_id = new_id("cmpl", body.request_id)
    timeout = get_timeout(service, request)
    priority, only_prompt = body.priority or 0, body.max_tokens == 0
    generation = Generation(service, request_id, prompts, params, body.cache_salt, priority, timeout, only_prompt)
    echoes = _echoes(service, body, prompts) if body.echo else None
    return await answer(request, generation, CompletionWriter(service, request_id, body, echoes), body)


def _vocabulary(service: Service, body: CompletionRequest) -> TextVocabulary:
    switches = body.skip_special_tokens, body.spaces_between_special_tokens
    return TextVocabulary(service.tokenizer, *(switch is not False for switch in switches))


def _echoes(service: Service, body: CompletionRequest, prompts: list[list[int]]) -> list[str]:
    """The text of each prompt."""
    given = as_prompts(body.prompt)
    if isinstance(given[0], str):
        return given
    vocabulary = _vocabulary(service, body)
    return [vocabulary.text(token_ids) for token_ids in prompts]


class CompletionWriter:
    """Makes the response, whole or in chunks. Answer j to prompt i has the index i * n + j."""

    def __init__(self, service: Service, request_id: str, body: CompletionRequest, echoes: list[str] | None) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._with_usage = body.include_usage or service.settings.enable_force_include_usage
        self._head = service.make_head(request_id)
        self._echoes = echoes
        self._vocabulary = _vocabulary(service, body)
        self._prompt_logprobs: dict[str, Sequence[TokenLogprobs | None]] = {}
        """By prompt: in a stream they come once, with the first of its answers, but are told with each."""
        self._begun: dict[int, CompletionLogprobsWriter] = {}
        """By the index of a choice: what writes its log-probabilities, if any are asked for."""
        self._is_only_text = body.logprobs is None and not (body.return_token_ids or body.continuous_usage)
        """Between its first and its last chunk, a choice's bring nothing but text."""
        self._templates: dict[int, TextTemplate] = {}

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
        choices: list[CompletionChoice] = []
        for index, output in enumerate(outputs):
            for one in sorted(output.outputs, key=lambda one: one.index):
                choice = self._choice(index, output, one)
                if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs)
                choices.append(choice)
        return {**self._head, "object": "text_completion", "choices": choices, "usage": usage}

    def part(self, index: int, output: RequestOutput, counter: UsageCounter) -> bytes | None:
        if self._is_only_text and len(output.outputs) == 1:
            (one,) = output.outputs
            number = self._number(index, one)
            if one.finish_reason is None and number in self._begun:
                return self._template(number).event(one.text) if one.text else None
        chunk = self.chunk(index, output, counter)
        return None if chunk is None else event(chunk)

    def chunk(self, index: int, output: RequestOutput, counter: UsageCounter) -> Completion | None:
        choices = [self._choice(index, output, one) for one in output.outputs if self._is_shown(index, one)]
        if not choices:
            return None
        made = self._make_chunk(choices)
        if self._body.continuous_usage:
            made["usage"] = counter.usage
        return made

    def usage_chunk(self, usage: Usage) -> Completion | None:
        if not self._with_usage:
            return None
        return {**self._head, "object": "text_completion", "choices": [], "usage": usage}

    def _template(self, number: int) -> TextTemplate:
        """Of a choice that has begun and goes on."""
        found = self._templates.get(number)
        if found is None:
            choice: CompletionChoice = {
                "index": number,
                "text": TextTemplate.PLACE,
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
            }
            found = self._templates[number] = TextTemplate(self._make_chunk([choice]))
        return found

    def _make_chunk(self, choices: list[CompletionChoice]) -> Completion:
        made: Completion = {**self._head, "object": "text_completion", "choices": choices}
        if self._with_usage:
            made["usage"] = None
        return made

    def _number(self, index: int, one: CompletionOutput) -> int:
        return index * (self._body.n or 1) + one.index

    def _is_shown(self, index: int, one: CompletionOutput) -> bool:
        """Half a character is no reason for a chunk, unless tokens themselves are asked for."""
        if one.text or one.finish_reason is not None or self._number(index, one) not in self._begun:
            return True
        return bool(one.token_ids) and (self._body.logprobs is not None or bool(self._body.return_token_ids))

    def _choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> CompletionChoice:
        number = self._number(index, one)
        is_first = number not in self._begun
        if is_first:
            context = [] if self._echoes else output.prompt_token_ids
            self._begun[number] = CompletionLogprobsWriter(self._tokenizer, self._vocabulary, context)
        with_echo = is_first and self._echoes is not None
        made: CompletionChoice = {
            "index": number,
            "text": self._echoes[index] + one.text if with_echo and self._echoes else one.text,
            "logprobs": self._logprobs(self._begun[number], output, one, with_echo),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._body.return_token_ids:
            made["token_ids"] = list(one.token_ids)
            if is_first:
                made["prompt_token_ids"] = output.prompt_token_ids
        return made

    def _logprobs(
        self, writer: CompletionLogprobsWriter, output: RequestOutput, one: CompletionOutput, with_echo: bool
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        token_ids = list(one.token_ids)
        # An answer that is left out has no tokens, but the engine's log-probabilities.
        logprobs = list(one.logprobs or ())[: len(token_ids)]
        if with_echo:
            token_ids = output.prompt_token_ids + token_ids
            logprobs = [*self._prompt_logprobs.setdefault(output.request_id, output.prompt_logprobs or ()), *logprobs]
        return writer.write(token_ids, logprobs, self._body.logprobs)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/completions",
        create_completion,
        "Go on with texts.",
        request=CompletionRequest,
        response=Completion,
        chunk=Completion,
        statuses=(404, 429, 504),
    ),
)
