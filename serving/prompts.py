"""From what a request says to token ids.

The invariant: a long text is tokenized in a thread, so that no stream waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.serving.errors import bad_request
from jaxllm.serving.protocol_chat import ChatMessage, ChatPromptFields
from jaxllm.serving.service import Service

_LONG = 8192
"""Characters that take about a millisecond."""


async def in_thread_if_long[T](size: int, work: Callable[[], T]) -> T:
    """What `work` returns, which handles `size` characters or tokens."""
    return work() if size < _LONG else await asyncio.to_thread(work)


async def encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""
    return await in_thread_if_long(len(text), lambda: tokenizer.encode(text, add_special_tokens))


async def encode_chat(service: Service, request: ChatPromptFields) -> list[int]:
    """Token ids of a conversation in its template.

    Raises:
        ApiError: the template may not be used, or its fields contradict each other.
        ValueError: the template refuses the messages, or the model has none.
    """
    size = sum(len(text_of(message)) for message in request.messages)
    text = await in_thread_if_long(size, lambda: _render(service, request))
    return await encode_text(service.tokenizer, text, request.add_special_tokens)


def as_prompts(prompt: Any) -> list[Any]:
    """The prompts in a request's field `prompt`: texts, or token ids of each."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


async def encode_prompts(service: Service, prompts: Sequence[Any], add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each of these prompts.

    Raises:
        ApiError: one of them is empty, or holds what is no token.
    """
    texts = [one for one in prompts if isinstance(one, str)]
    for text in texts:
        service.check_text(text, "prompt")
    encode = service.tokenizer.encode
    size = sum(map(len, texts))
    encoded = await in_thread_if_long(
        size, lambda: [encode(one, add_special_tokens) if isinstance(one, str) else one for one in prompts]
    )
    vocab_size = service.engine.model_config.vocab_size
    for token_ids in encoded:
        if not token_ids:
            raise bad_request("a prompt is empty: give at least one token", param="prompt")
        if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise bad_request(f"token ids of this model are numbers from 0 to {vocab_size - 1}", param="prompt")
        service.check_prompt(token_ids, "prompt")
    return encoded


def _render(service: Service, request: ChatPromptFields) -> str:
    tokenizer = service.tokenizer
    if request.chat_template is not None:
        if not service.settings.trust_request_chat_template:
            message = "this server takes no chat_template of a request: --trust-request-chat-template allows it"
            raise bad_request(message, param="chat_template")
        tokenizer = tokenizer.with_chat_template(request.chat_template)
    if request.continue_final_message and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other: set the latter to false"
        raise bad_request(message, param="continue_final_message")
    variables = service.chat_template_kwargs | (request.chat_template_kwargs or {})
    for name in variables.keys() & {"messages", "add_generation_prompt"}:
        raise bad_request(f"chat_template_kwargs has {name}, which is a field of its own", param="chat_template_kwargs")
    messages = [_as_template_message(message) for message in request.messages]
    text = tokenizer.render_chat(messages, request.add_generation_prompt, **variables)
    return _cut_after(text, messages) if request.continue_final_message else text


def _as_template_message(message: ChatMessage) -> dict[str, str]:
    made = {"role": "system" if message.role == "developer" else message.role, "content": text_of(message)}
    return made if message.name is None else made | {"name": message.name}


def text_of(message: ChatMessage) -> str:
    """What a message says; parts are lines of their own, as vLLM has it."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content)


def _cut_after(text: str, messages: Sequence[dict[str, str]]) -> str:
    """Without what the template adds behind the last message. Some templates take away the spaces around it."""
    last = messages[-1]["content"]
    for form in (last, last.lstrip(), last.strip()):
        if form and (start := text.rfind(form)) >= 0:
            return text[: start + len(form)]
    raise bad_request(
        "the chat template does not show the last message as it is: it cannot be continued", param="messages"
    )
