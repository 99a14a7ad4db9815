"""Token ids to text, one token or many at a time.

The invariant: what `append` returned so far, plus what `flush` returns, is the text that decoding prompt and
answer at once gives after the prompt's part (for byte-level tokenizers: decoding the answer alone), however the
tokens are cut into calls. Text is returned as soon as no later token can change it, and the work per token does
not grow with the answer.

Three things make the text of a token depend on its neighbours:

- A byte-level token can end inside a UTF-8 sequence. Such a text ends in one U+FFFD, which is held until the next
  token shows what it is: a character, or for certain a replacement character.
- A decoder can treat the first token of a text differently (SentencePiece's lose their leading space), so one
  token that was shown is decoded again in front of the new ones, as context.
- Byte tokens (`<0xE4>`) that follow each other are one unit to the `tokenizers` library: a character each if all of
  them together are UTF-8, else one U+FFFD for every byte of the run. See `_ByteRun`.

Without `spaces_between_special_tokens`, "decoding at once" has an exception, which is vLLM's: an added token that
follows an added token of the answer (tokens without text do not count) is what the vocabulary writes, without a space
that the decoder would put before it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import decoders

from jaxllm.engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")

MAX_UNFINISHED_TOKENS = 4
"""A UTF-8 sequence has at most 4 bytes and a token at least 1, so no more tokens decide how a text ends."""

MAX_HELD_BYTES = 32
"""Byte tokens held back at most, once they end on a whole character: a run that goes on is shown in parts."""


class TokenText(NamedTuple):
    """What a token that has text is to a detokenizer."""

    alone: str
    """Its text as the only token of an answer."""
    byte: int | None
    """Its value if it is a byte token."""
    is_whole: bool
    """It ends and begins with whole characters, and its text does not depend on the token before it."""
    joined: str | None = None
    """Its text behind an added token, if it is one itself and no space comes between those."""


class TextVocabulary:
    """The tokens' texts, each looked up once for all answers."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        has_spaces = skip_special_tokens or spaces_between_special_tokens  # vLLM's rule
        self._joined = {} if has_spaces else tokenizer.added_tokens
        self._skip_special_tokens = skip_special_tokens
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.has_byte_tokens = _has_byte_fallback(tokenizer)
        self.needs_context = not isinstance(tokenizer.backend.decoder, decoders.ByteLevel)
        """A token's text depends on whether one comes before it."""
        self._known: dict[int, TokenText | None] = {}

    def get(self, token_id: int) -> TokenText | None:
        """None for a token without text: one that is skipped, or not in the vocabulary."""
        try:
            return self._known[token_id]
        except KeyError:
            self._known[token_id] = found = self._look_up(token_id)
            return found

    def name(self, token_id: int) -> str:
        """The token's text alone, also if texts leave it out; "" for one that is not in the vocabulary."""
        found = None if token_id in self._skipped_ids else self.get(token_id)
        return self._tokenizer.decode([token_id], skip_special_tokens=False) if found is None else found.alone

    def decode(self, ids: list[int]) -> str:
        """What the tokenizer's decoder makes of tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def text(self, ids: Sequence[int]) -> str:
        """What tokens are as an answer."""
        detokenizer = IncrementalDetokenizer(self, ())
        return detokenizer.append(ids) + detokenizer.flush()

    def _look_up(self, token_id: int) -> TokenText | None:
        token = None if token_id in self._skipped_ids else self._tokenizer.id_to_token(token_id)
        if not token:
            return None
        alone = self.decode([token_id])
        byte = _parse_byte_token(token) if self.has_byte_tokens else None
        joined = self._joined.get(token_id) if byte is None else None
        is_whole = joined is None and not self.needs_context and REPLACEMENT not in alone
        return TokenText(alone, byte, is_whole, joined)


class IncrementalDetokenizer:
    """The growing text of one answer."""

    def __init__(self, vocabulary: TextVocabulary, prompt_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._run = _ByteRun() if vocabulary.has_byte_tokens else None
        self._pending: list[int] = []
        """Tokens whose text is not complete; together they end in U+FFFD."""
        self._context: list[int] = []
        """The token before the pending ones, or nothing at the start of a text and where none is needed."""
        self._num_shown = 0
        """Characters of the text of context and pending tokens that were returned."""
        self._follows_joined = False
        """The last token that has text was one of those without spaces between them."""
        self._set_context(self._find_context(prompt_ids))

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became final, which can be empty."""
        if len(token_ids) == 1 and not self._pending:  # nearly every token of a stream
            found = self._vocabulary.get(token_ids[0])
            if found is not None and found.is_whole:
                self._follows_joined = False
                return found.alone
        texts: list[str] = []
        neighbours: list[int] = []
        for token_id in token_ids:
            found = self._vocabulary.get(token_id)
            if found is None:
                continue
            follows, self._follows_joined = self._follows_joined, found.joined is not None
            if follows and found.joined is not None:
                texts += self._append_texts(neighbours), self._settle(), found.joined
                self._settle_at(token_id)
                neighbours = []
                continue
            if found.byte is None:
                neighbours.append(token_id)
                continue
            texts += self._append_texts(neighbours), self._settle(), self._append_byte(token_id, found.byte)
            neighbours = []
        texts.append(self._append_texts(neighbours))
        return "".join(texts)

    def flush(self) -> str:
        """End the text; returns what was held."""
        return self._settle() + self._close_run()

    def _append_texts(self, token_ids: list[int]) -> str:
        """Add tokens that are no byte tokens."""
        if not token_ids:
            return ""
        before = self._close_run()
        self._pending += token_ids
        text = self._decode(self._context + self._pending)
        end = len(text) - text.endswith(REPLACEMENT)
        new = text[self._num_shown : end]
        if end == len(text):
            self._settle_at(token_ids[-1])
        else:
            self._num_shown = end
            self._bound_pending()
        return before + new

    def _append_byte(self, token_id: int, byte: int) -> str:
        assert self._run is not None, "only a decoder with byte fallback has byte tokens"
        return self._take_run() if self._run.append(token_id, byte) else ""

    def _settle(self) -> str:
        """The text of the pending tokens, now that nothing can complete it."""
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)[self._num_shown :]
        self._settle_at(self._pending[-1])
        return text

    def _settle_at(self, token_id: int) -> None:
        self._pending.clear()
        self._set_context([token_id] if self._vocabulary.needs_context else [])

    def _bound_pending(self) -> None:
        """Forget pending tokens that no longer matter: UTF-8 finds its way again after any cut."""
        surplus = len(self._pending) - MAX_UNFINISHED_TOKENS
        if surplus <= 0:
            return
        if self._vocabulary.needs_context:
            self._context = self._pending[surplus - 1 : surplus]
        del self._pending[:surplus]
        self._num_shown = len(self._decode(self._context + self._pending)) - len(REPLACEMENT)

    def _close_run(self) -> str:
        if self._run is None:
            return ""
        text = self._take_run()
        self._run.restart()
        return text

    def _take_run(self) -> str:
        assert self._run is not None, "only a decoder with byte fallback has byte tokens"
        ids, text = self._run.take()
        if not ids:
            return ""
        if not self._context:
            text = self._decode(ids)  # At the start of a text, where the decoder may strip a space.
        self._set_context(ids[-1:])
        return text

    def _set_context(self, ids: list[int]) -> None:
        """At most one token, which has text."""
        self._context = ids
        found = self._vocabulary.get(ids[0]) if ids else None
        self._num_shown = 0 if found is None else len(found.alone)

    def _find_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last token, passing over those without text and those that end inside a character."""
        if not self._vocabulary.needs_context:
            return []
        for token_id in reversed(prompt_ids):
            found = self._vocabulary.get(token_id)
            if found is not None and (found.byte is not None or not found.alone.endswith(REPLACEMENT)):
                return [token_id]
        return []

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.decode(ids)


class _ByteRun:
    """Byte tokens that follow each other, held because a later byte can turn all of them into U+FFFD.

    Once the run cannot become valid every byte is a U+FFFD at once. A valid run is held until a token of another
    kind ends it, or until it is `MAX_HELD_BYTES` long: streaming must not stop for the whole of an answer in a
    script that the vocabulary lacks. (Only if such a long run turns invalid later on does the text differ from
    decoding it at once: the characters already shown stay characters.)
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._bytes = bytearray()
        self.restart()

    def restart(self) -> None:
        assert not self._ids, "a run was dropped"
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._broken = False

    def append(self, token_id: int, byte: int) -> bool:
        """Add a byte; returns whether what is held is certain now."""
        self._ids.append(token_id)
        self._bytes.append(byte)
        if self._broken:
            return True
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._broken = True
        return self._broken or (len(self._ids) >= MAX_HELD_BYTES and self._is_whole())

    def take(self) -> tuple[list[int], str]:
        """The held tokens and their text, as it is if no byte follows."""
        valid = not self._broken and self._is_whole()
        text = self._bytes.decode() if valid else REPLACEMENT * len(self._bytes)
        ids, self._ids, self._bytes = self._ids, [], bytearray()
        return ids, text

    def _is_whole(self) -> bool:
        unfinished, _ = self._utf8.getstate()
        return not unfinished


def _has_byte_fallback(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.backend.decoder
    return decoder is not None and decoder.decode(["<0x41>"]) == "A"


def _parse_byte_token(token: str) -> int | None:
    """The byte of a token as `<0xE4>`; None for every other token."""
    match = BYTE_TOKEN.fullmatch(token)
    return None if match is None else int(match[1], 16)
