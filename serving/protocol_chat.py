"""Requests to and responses of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NotRequired, TypedDict

from pydantic import Field

from jaxllm.serving.protocol import NEUTRAL, GenerationRequest, Head, PromptLogprobs, Usage
from jaxllm.serving.requests import Items, RequestModel

Role = Literal["system", "developer", "user", "assistant"]
MAX_MESSAGES = 16_384


class TextPart(RequestModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    """A message of a conversation."""

    # As a client sends back the message of an answer.
    not_served: ClassVar = {
        "tool_calls": (None, []),
        "function_call": (None,),
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "reasoning": (None,),
        "reasoning_content": (None,),
    }

    role: Role
    """developer is another word for system."""
    content: str | Items[TextPart]
    name: str | None = None
    """For the chat template."""


class ChatPromptFields(RequestModel):
    """How a conversation becomes a prompt."""

    messages: Items[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool = True
    """End the prompt where the assistant's answer begins."""
    continue_final_message: bool = False
    """End the prompt with the last message, which the answer goes on with; needs add_generation_prompt=false."""
    add_special_tokens: bool = False
    """Add the begin token, although templates write their own."""
    chat_template: str | None = None
    """Jinja template instead of the model's; the server has to allow it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template."""


class ChatCompletionRequest(GenerationRequest, ChatPromptFields):
    """A conversation to answer."""

    not_served: ClassVar = NEUTRAL | {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
        "prompt_cache_key": (None,),
        "safety_identifier": (None,),
        "echo": (None, False),
    }

    max_completion_tokens: int | None = None
    """The newer name of max_tokens; by default up to the model's context length."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=-1)
    """How many alternatives to each token are told: 20 at the most, unless the engine's max_logprobs allows more; -1 is
    all tokens."""


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(Head):
    """An answer, whole."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(Head):
    """A part of an answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
