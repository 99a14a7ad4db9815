"""From the fields of a request to `SamplingParams`.

The invariant: a field goes by its name; one that `SamplingParams` does not have is refused, none is dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.serving.errors import bad_request
from jaxllm.serving.protocol import GenerationRequest, SamplingFields
from jaxllm.serving.protocol_chat import ChatCompletionRequest
from jaxllm.serving.protocol_completions import CompletionRequest

NAMES = frozenset(item.name for item in dataclasses.fields(SamplingParams))


def chat_params(request: ChatCompletionRequest, max_logprobs: int) -> SamplingParams:
    """Raises ApiError or ValueError: a field is not supported, or a value is out of range."""
    num_top = request.top_logprobs or 0
    if num_top and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", param="top_logprobs")
    if max_logprobs != -1 and not 0 <= num_top <= max_logprobs:
        remedy = f"ask for 0 to {max_logprobs}, or start the server with --max-logprobs -1, which is no limit"
        raise bad_request(f"top_logprobs={num_top} is more than this server tells: {remedy}", param="top_logprobs")
    logprobs = num_top if request.logprobs else None
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return _make(request, max_tokens=max_tokens, logprobs=logprobs)


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Raises ApiError or ValueError: a field is not supported, or a value is out of range."""
    # An engine always makes a token; with echo and max_tokens=0, it is left out of the answer.
    max_tokens = 1 if request.echo and request.max_tokens == 0 else request.max_tokens
    prompt_logprobs = request.logprobs if request.echo and request.prompt_logprobs is None else request.prompt_logprobs
    return _make(request, max_tokens=max_tokens, logprobs=request.logprobs, prompt_logprobs=prompt_logprobs)


def _make(request: GenerationRequest, **others: Any) -> SamplingParams:
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not part of a stream: leave stream away", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream=true: leave it away", param="stream_options")
    given = {name: getattr(request, name) for name in SamplingFields.model_fields} | others
    fields = {name: value for name, value in given.items() if value is not None}
    for name in fields.keys() - NAMES:
        raise bad_request(f"{name} is not supported by this server yet: leave it away", param=name, code="unsupported")
    # None is a value of its own here: no limit but the context length.
    fields["max_tokens"] = others["max_tokens"]
    if "logit_bias" in fields:
        fields["logit_bias"] = _token_ids(fields["logit_bias"])
    fields["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**fields)


def _token_ids(biases: dict[str, float]) -> dict[int, float]:
    """JSON has no other keys than texts."""
    for key in biases:
        if not key.isdecimal():
            raise bad_request(f"logit_bias[{key!r}] is not a token id: use numbers as keys", param="logit_bias")
    return {int(key): value for key, value in biases.items()}
