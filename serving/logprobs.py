"""Log-probabilities as the APIs tell them, from those of the engine (vLLM's: per token a dict by token id).

The invariant: the chosen token comes first and is always there; alternatives are in the order of their rank, and as
many as were asked for. Offsets of texts count the characters that a client sees, also where a character is made of
several tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxllm.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer, TextVocabulary
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import Logprob
from jaxllm.serving.protocol import PromptLogprob, PromptLogprobs
from jaxllm.serving.protocol_chat import ChatLogprobs, TokenLogprob, TopLogprob
from jaxllm.serving.protocol_completions import CompletionLogprobs
from jaxllm.serving.token_bytes import token_bytes

type TokenLogprobs = Mapping[int, Logprob]
"""By token id."""

LEAST = -9999.0
"""JSON has no -inf."""


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> ChatLogprobs:
    """Of the tokens of an answer, or of a part of it."""
    content: list[TokenLogprob] = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        top = [_entry(tokenizer, one, candidates[one]) for one in _best(candidates, num_top)]
        content.append({**_entry(tokenizer, token_id, candidates[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs_body(prompt_logprobs: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """As vLLM has them."""
    body: PromptLogprobs = []
    for candidates in prompt_logprobs:
        if candidates is None:
            body.append(None)
            continue
        entries: dict[str, PromptLogprob] = {}
        for token_id, found in candidates.items():
            entries[str(token_id)] = {
                "logprob": _finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
        body.append(entries)
    return body


class CompletionLogprobsWriter:
    """Log-probabilities of one answer, which may come in parts.

    Args:
        context: tokens before those that are told: the prompt, unless it is echoed.
        start: characters of the answer's text before them.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: TextVocabulary, context: Sequence[int], start: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(vocabulary, context)
        self._offset = start

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], num_top: int
    ) -> CompletionLogprobs:
        """Of the next tokens; those without log-probabilities get null."""
        body: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, candidates in zip(token_ids, logprobs, strict=True):
            body["tokens"].append(_text(self._tokenizer, token_id, candidates.get(token_id) if candidates else None))
            body["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.append([token_id]))
            if candidates is None:
                body["token_logprobs"].append(None)
                body["top_logprobs"].append(None)
                continue
            body["token_logprobs"].append(_finite(candidates[token_id].logprob))
            top: dict[str, float] = {}
            for one in [token_id, *_best(candidates, num_top)] if num_top else []:
                # Two tokens may have the same text: the likelier one is told.
                top.setdefault(_text(self._tokenizer, one, candidates[one]), _finite(candidates[one].logprob))
            body["top_logprobs"].append(top)
        return body


def _best(candidates: TokenLogprobs, num_top: int) -> list[int]:
    """The most likely ones in order; -1: all."""
    ordered = sorted(candidates, key=lambda token_id: -candidates[token_id].logprob)
    return ordered if num_top == -1 else ordered[:num_top]


def _entry(tokenizer: Tokenizer, token_id: int, found: Logprob) -> TopLogprob:
    text = _text(tokenizer, token_id, found)
    return {"token": text, "logprob": _finite(found.logprob), "bytes": list(token_bytes(tokenizer, token_id, text))}


def _text(tokenizer: Tokenizer, token_id: int, found: Logprob | None) -> str:
    """A token's text; what is no whole character is written as its bytes, so that every token has its own."""
    text = found.decoded_token if found is not None else None
    if text is None:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
    if REPLACEMENT in text:
        raw = token_bytes(tokenizer, token_id, text)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
