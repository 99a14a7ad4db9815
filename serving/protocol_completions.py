"""Requests to and responses of /v1/completions."""

from __future__ import annotations

from typing import ClassVar, Literal, NotRequired, TypedDict

from pydantic import Field

from jaxllm.serving.protocol import NEUTRAL, GenerationRequest, Head, PromptLogprobs, Usage
from jaxllm.serving.requests import Items

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationRequest):
    """Texts to go on with."""

    not_served: ClassVar = NEUTRAL | {"suffix": (None, ""), "prompt_embeds": (None,)}

    prompt: str | Items[str] | Items[int] | Items[Items[int]] = Field(min_length=1)
    """A text or its token ids, or a list of those."""
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """With echo it may be 0: nothing is added to the prompt."""
    echo: bool | None = None
    """Begin the answer with the prompt."""
    logprobs: int | None = Field(default=None, ge=-1)
    """How many alternatives to each token are told, with the log-probabilities; of the prompt as well with echo."""
    add_special_tokens: bool = True
    """Add the begin token to texts, if the model has one."""


class CompletionLogprobs(TypedDict):
    """One entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters of the text before it."""


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(Head):
    """The answers, whole; in a stream each is a part of one, and usage may be missing or null."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
