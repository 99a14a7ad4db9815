"""What the OpenAI-compatible requests and responses have in common.

The invariant: names and meanings are OpenAI's, and vLLM's for what OpenAI does not have.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

from pydantic import Field

from jaxllm.serving.requests import FirstMistake, Items, RequestModel

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0, 1),
    "best_of": (None, 1),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
    "truncate_prompt_tokens": (None,),
    "kv_transfer_params": (None,),
}


class StreamOptions(RequestModel):
    """About the chunks of a stream."""

    not_served: ClassVar = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None
    """Send a last chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk."""


class SamplingFields(RequestModel):
    """Fields that are those of `SamplingParams` with the same name. None is its default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], FirstMistake()] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None


class GenerationRequest(SamplingFields):
    """What a request for text may say besides its prompt."""

    model: str | None = None
    """By default the model that is served."""
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Shown in the log."""
    request_id: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^[\w.:-]+$")
    """Becomes part of the response's id."""
    cache_salt: str | None = Field(default=None, min_length=1)
    """Only requests with the same salt share cached computations."""
    priority: int | None = None
    """The lower, the sooner; other than 0 only if the server's scheduling policy heeds it."""
    return_token_ids: bool | None = None
    """Send token ids besides texts."""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Head(TypedDict):
    """What every response and chunk begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Tokens of all prompts and answers of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(TypedDict):
    """vLLM's form of a token's log-probability."""

    logprob: float
    rank: NotRequired[int | None]
    decoded_token: NotRequired[str | None]


type PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For every token of a prompt, by token id; the first one has none."""
