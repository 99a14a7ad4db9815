"""Chat messages to the text a model was trained on, through the model's own Jinja template.

Templates are rendered as Hugging Face transformers does (same extensions, filters and whitespace), in a
sandbox: they come from the model's author.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

type Message = Mapping[str, Any]
"""At least "role" and "content"."""

EXAMPLE = "[{'role': 'user', 'content': 'Hello'}]"

_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """The templates of one model, by name: "default", and "tool_use" if tools have one of their own."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]):
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)

    def render(self, /, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt for a conversation.

        Args:
            messages: at least one.
            add_generation_prompt: end with the beginning of an answer.
            variables: for the template, as `tools`.

        Raises:
            ValueError: the messages are malformed, the template refuses them, or there is no template.
        """
        check_messages(messages)
        template = _compile(self._choose(variables))
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render({**self._special_tokens, **given, **variables})
        except _TEMPLATE_FAILURES as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def _choose(self, variables: Mapping[str, Any]) -> str:
        name = "tool_use" if variables.get("tools") and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(f"the model has chat templates {sorted(self._sources)}, but none named 'default'")
        return self._sources[name]


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError unless these are messages a template can take."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r} is not valid: give a list of at least one message, as {EXAMPLE}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}]={message!r} is not valid: give a dict, as {EXAMPLE}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] has role {message.get('role')!r}: give a string, as 'user'")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"messages[{index}] has content {content!r}: give a string")


class _GenerationBlock(Extension):
    """`{% generation %}` marks answers in training data; here it means its content."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the model's chat template is broken, line {error.lineno}: {error.message}") from error
