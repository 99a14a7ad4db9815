"""Text to token ids and back, the same for every kind of model file.

Invariant: `decode` of all ids of an answer is what its stream adds up to; nothing here changes text after
decoding (no clean-up of spaces), so a longer prefix never rewrites a shorter one's finished characters.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxllm.engine.chat_template import ChatTemplate, Message
from jaxllm.engine.gguf_tokenizer import gguf_backend, gguf_chat_templates, gguf_special_tokens
from jaxllm.engine.hf_tokenizer import hf_backend, hf_chat_templates, hf_settings, hf_special_tokens


class Tokenizer:
    """A tokenizer with its special tokens and its chat template; nothing in it changes, threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        """The tokenizers library's object, for its DecodeStream."""
        self._special_tokens = dict(special_tokens or {})
        self._template = ChatTemplate(chat_templates, self._special_tokens) if chat_templates else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the begin token that the model expects unless told otherwise.

        Other threads run meanwhile: the library lets them only where it encodes a batch. The fast form leaves out
        where the tokens are in the text.
        """
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD, unknown ids nothing. Other threads run."""
        (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, index: int) -> str | None:
        """A token as the vocabulary writes it; None for an id that no token has."""
        return self.backend.id_to_token(index)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model may have more rows than that."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def added_tokens(self) -> Mapping[int, str]:
        """Tokens beside those of the model behind the tokenizer, special ones and others, as they are written."""
        return {index: token.content for index, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def bos_token_id(self) -> int | None:
        """The token a text begins with."""
        return self._id_of("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """The token a text ends with; an answer may end with others too (`ModelConfig.eos_token_ids`)."""
        return self._id_of("eos_token")

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another template (Jinja), for conversations with tools as well."""
        return Tokenizer(self.backend, self._special_tokens, {"default": source})

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(self, /, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt for a conversation.

        Args:
            messages: at least one, each with a "role" and a "content".
            add_generation_prompt: end with the beginning of an answer.
            variables: for the template, as `tools`.

        Raises:
            ValueError: the messages are malformed, the template refuses them, or the model has none.
        """
        if self._template is None:
            raise ValueError("the model has no chat template: use generate with a prompt instead of chat")
        return self._template.render(messages, add_generation_prompt, **variables)

    def encode_chat(
        self, /, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of `render_chat`, whose template already writes the special tokens."""
        text = self.render_chat(messages, add_generation_prompt, **variables)
        check_unicode("messages", text)
        return self.encode(text, add_special_tokens=False)

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def check_unicode(name: str, text: str) -> None:
    """Raises ValueError if a text holds half of a surrogate pair: it is no character, and no bytes stand for it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode: {text[error.start]!r} at position {error.start} is no character: leave it away"
        ) from error


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or a Hugging Face folder.

    Raises:
        ValueError: there is none, it is broken, or it is of a kind that is not supported.
    """
    if path.is_dir():
        settings = hf_settings(path)
        return Tokenizer(hf_backend(path, settings), hf_special_tokens(settings), hf_chat_templates(path, settings))
    if not path.is_file():
        raise ValueError(f"tokenizer={str(path)!r} does not exist: give a GGUF file or a Hugging Face folder")
    # Imported only here: no other format needs the gguf package.
    metadata = importlib.import_module("jaxllm.models.gguf_file").read_gguf_header(path).metadata
    try:
        return Tokenizer(gguf_backend(metadata), gguf_special_tokens(metadata), gguf_chat_templates(metadata))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
