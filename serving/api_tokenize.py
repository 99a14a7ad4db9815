"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import ClassVar, TypedDict

from pydantic import Field
from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.errors import bad_request, json_response
from jaxllm.serving.prompts import encode_chat, encode_text, in_thread_if_long
from jaxllm.serving.protocol_chat import MAX_MESSAGES, ChatMessage, ChatPromptFields
from jaxllm.serving.requests import Items, RequestModel, read_request
from jaxllm.serving.service import Service


class TokenizeRequest(ChatPromptFields):
    """A text, or a conversation to put into the chat template."""

    not_served: ClassVar = {"tools": (None, [])}

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = Field(default=None, max_length=MAX_MESSAGES)  # pyright: ignore[reportIncompatibleVariableOverride]
    add_special_tokens: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Add the begin token; by default to a text, and not to a conversation, whose template writes its own."""
    return_token_strs: bool = False
    """Tell how the vocabulary writes each token, too."""


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Items[int]


class DetokenizedText(TypedDict):
    prompt: str


async def tokenize(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    body = await read_request(request, TokenizeRequest)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give one of prompt and messages", param="prompt")
    if body.prompt is not None:
        tokens = await encode_text(service.tokenizer, body.prompt, body.add_special_tokens is not False)
    else:
        fields = {name: getattr(body, name) for name in ChatPromptFields.model_fields}
        fields["add_special_tokens"] = body.add_special_tokens is True
        tokens = await encode_chat(service, ChatPromptFields.model_construct(**fields))
    written = await _written(service.tokenizer, tokens) if body.return_token_strs else None
    answer: Tokens = {
        "count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": written
    }  # fmt: skip
    return json_response(answer)


async def detokenize(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    body = await read_request(request, DetokenizeRequest)
    service.check_model(body.model)
    limit = service.engine.model_config.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < limit:
        raise bad_request(f"token ids of this model are numbers from 0 to {limit - 1}", param="tokens")
    decode = service.tokenizer.decode
    text = await in_thread_if_long(len(body.tokens), lambda: decode(body.tokens, skip_special_tokens=False))
    answer: DetokenizedText = {"prompt": text}
    return json_response(answer)


async def _written(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """As the vocabulary has them."""
    return await in_thread_if_long(len(tokens), lambda: [tokenizer.id_to_token(token) or "" for token in tokens])


ENDPOINTS = (
    Endpoint("POST", "/tokenize", tokenize, "Tokens of a text.", TokenizeRequest, Tokens, statuses=(404,)),
    Endpoint("POST", "/detokenize", detokenize, "Text of tokens.", DetokenizeRequest, DetokenizedText, statuses=(404,)),
)
