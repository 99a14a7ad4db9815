"""From what a caller asks for to a `Request`: tokenized and checked whole.

Invariant: whatever is wrong with a request is a ValueError here, so that no other request ever notices it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from jaxllm.config import EngineConfig
from jaxllm.engine.tokenizer import Tokenizer, check_unicode
from jaxllm.model_config import ModelConfig
from jaxllm.request import Request
from jaxllm.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_SUPPRESSED_TOKEN_IDS,
    SamplingParams,
)
from jaxllm.scheduling.policy_choice import make_order

logger = logging.getLogger(__name__)

MAX_PROMPT_LOGPROBS = 1 << 26
"""Log-probabilities of one prompt: some 10 GB in the form that callers get them in."""


class TextPrompt(TypedDict):
    """A prompt as vLLM's dictionaries have it."""

    prompt: str
    cache_salt: NotRequired[str]
    """Only prompts with the same salt share K/V in the cache."""


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """Their text, for the output to show."""
    cache_salt: NotRequired[str]


type Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")

MOST_PRIORITY = 2**31 - 1


def check_priority(priority: object) -> None:
    """Raises ValueError if it is no priority under any policy."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority={priority!r} is not valid: use a whole number, the lower the sooner")
    if abs(priority) > MOST_PRIORITY:
        raise ValueError(f"priority is not valid: use a number from -{MOST_PRIORITY} to {MOST_PRIORITY}")


class RequestMaker:
    """Makes the requests of one engine.

    Args:
        tokenizer: the model's.
        config: resolved; its seed is that of the seeds drawn for requests without one.
        model: facts of the checkpoint, which may recommend sampling parameters.

    Raises:
        ValueError: those are not valid.
    """

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig, model: ModelConfig) -> None:
        assert isinstance(config.max_model_len, int), "unresolved defaults"
        self._tokenizer = tokenizer
        self._max_model_len = config.max_model_len
        self._max_logprobs = config.max_logprobs
        self._policy = config.scheduling_policy
        self.uses_priority = make_order(config.scheduling_policy).uses_priority
        """Whether a request may have a priority."""
        self._model = model
        self._eos_token_ids = frozenset(model.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self.default_params = _make_default_params(config, model)
        """Of requests that bring none."""

    def make(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, priority: int = 0
    ) -> tuple[str | None, Request]:
        """The prompt's text, if it was text, and the checked request, with a child for each answer but the first.

        Raises:
            ValueError: the request cannot be served; the message names what is wrong and what helps.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r} is not a string")
        check_unicode("request_id", request_id)
        if not isinstance(params, SamplingParams | None):
            raise ValueError(f"params={params!r} is not a SamplingParams")
        params = params or self.default_params
        self._check_priority(priority)
        text, token_ids = self._tokenize(prompt)
        self._check_prompt(token_ids)
        bad_word_ids = self._tokenize_bad_words(params)
        self._check_params(params, bad_word_ids)
        self._check_logprobs(params, len(token_ids))
        request = Request(
            request_id,
            tuple(map(int, token_ids)),  # NumPy's would overflow, and are no JSON
            params,
            self._eos_token_ids,
            max_len=min(self._max_model_len, len(token_ids) + (params.max_tokens or self._max_model_len)),
            seed=self._make_seed(params, 0),
            cache_salt=_get_salt(prompt),
            priority=int(priority),  # of an enumeration of the caller's, which the engine's process may not know
            bad_word_ids=bad_word_ids,
        )
        request.fork({f"{index}_{request_id}": self._make_seed(params, index) for index in range(1, params.n)})
        return text, request

    def _make_seed(self, params: SamplingParams, index: int) -> int:
        """Of the answer with this index."""
        return (self._seeds.getrandbits(64) if params.seed is None else int(params.seed) + index) % 2**64

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text, given = _parts_of(prompt)
        if given is None and isinstance(text, str):
            check_unicode("prompt", text)
            return text, self._tokenizer.encode(text)
        if not isinstance(given, Iterable) or isinstance(given, str | bytes) or not isinstance(text, str | None):
            raise ValueError(
                f"prompt={prompt!r} is neither text, nor a list of token ids, nor a dictionary with one of them as "
                "'prompt' or 'prompt_token_ids'"
            )
        return text, list(given)

    def _check_priority(self, priority: int) -> None:
        check_priority(priority)
        if priority and not self.uses_priority:
            raise ValueError(
                f"priority={priority} means nothing under scheduling_policy={self._policy!r}: start the engine with "
                "scheduling_policy='priority' or 'dynamic', or leave it 0"
            )

    def _check_prompt(self, token_ids: list[int]) -> None:
        limit, vocab_size = self._max_model_len, self._model.vocab_size
        if not token_ids:
            raise ValueError("prompt is empty: give at least one token; the tokenizer adds none for an empty text")
        if len(token_ids) >= limit:
            raise ValueError(
                f"prompt has {len(token_ids)} tokens, but max_model_len={limit} holds prompt and answer together: "
                f"shorten it to {limit - 1} or less, or raise max_model_len"
            )
        for position, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt holds {token!r} at position {position}: token ids of this model are whole numbers "
                    f"from 0 to {vocab_size - 1}"
                )

    def _tokenize_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written inside of text, and also behind a space if that makes another first token of it.

        That is vLLM's rule: a spelling of another length is not looked for, as its beginning is a token of its own.
        """
        spellings: list[tuple[int, ...]] = []
        for word in params.bad_words:
            check_unicode("bad_words", word)
            inside, behind_space = (
                tuple(self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
            )
            spellings.append(inside)
            if behind_space[:1] != inside[:1] and len(behind_space) == len(inside):
                spellings.append(behind_space)
            if not 0 < len(inside) <= MAX_BAD_WORD_TOKENS:
                raise ValueError(
                    f"bad_words: {word!r} has {len(inside)} tokens, 1 to {MAX_BAD_WORD_TOKENS} can be: use another one"
                )
        if len(spellings) > MAX_BAD_WORDS:
            raise ValueError(
                f"bad_words has {len(spellings)} spellings, a word counting twice if it differs behind a space, but "
                f"{MAX_BAD_WORDS} can be: give fewer words"
            )
        return tuple(spellings)

    def _check_params(self, params: SamplingParams, bad_word_ids: tuple[tuple[int, ...], ...]) -> None:
        vocab_size = self._model.vocab_size
        for name in ("logit_bias", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token >= vocab_size:
                    raise ValueError(f"{name} has token id {token}: those of this model are from 0 to {vocab_size - 1}")
        stops: set[int] = set()
        if params.min_tokens:
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if len(stops) > MAX_SUPPRESSED_TOKEN_IDS:
            raise ValueError(
                f"min_tokens={params.min_tokens} has to hold back {len(stops)} stop tokens, "
                f"but at most {MAX_SUPPRESSED_TOKEN_IDS} can be: give fewer stop_token_ids, or min_tokens=0"
            )
        excluded = stops | {word[0] for word in bad_word_ids if len(word) == 1}
        if params.allowed_token_ids is not None and excluded.issuperset(params.allowed_token_ids):
            raise ValueError(
                f"allowed_token_ids={list(params.allowed_token_ids)} are all excluded by bad_words, or by min_tokens "
                "as stop tokens: allow another token, or take those back"
            )

    def _check_logprobs(self, params: SamplingParams, prompt_len: int) -> None:
        limit, vocab_size = self._max_logprobs, self._model.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and (vocab_size if asked == -1 else asked) > limit != -1:
                raise ValueError(
                    f"{name}={asked} is more than max_logprobs={limit} allows: ask for 0 to {limit}, or start the "
                    "engine with max_logprobs=-1, which is no limit"
                )
        asked = params.prompt_logprobs
        per_token = vocab_size if asked == -1 else min(asked or 0, vocab_size)
        if prompt_len * per_token > MAX_PROMPT_LOGPROBS:
            raise ValueError(
                f"prompt_logprobs={asked} of {prompt_len} tokens are {prompt_len * per_token} numbers, at most "
                f"{MAX_PROMPT_LOGPROBS} can be: ask for fewer, or shorten the prompt to "
                f"{MAX_PROMPT_LOGPROBS // per_token} tokens"
            )


def _make_default_params(config: EngineConfig, model: ModelConfig) -> SamplingParams:
    if config.generation_config == "none" or not model.sampling_defaults:
        return SamplingParams()
    try:
        params = SamplingParams(**dict(model.sampling_defaults))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}; or set generation_config='none'") from error
    named = ", ".join(f"{name}={value}" for name, value in model.sampling_defaults)
    logger.warning(
        "requests without sampling parameters get those of the model's generation_config.json: %s "
        "(generation_config='none' leaves them away)",
        named,
    )
    return params


def _get_salt(prompt: Prompt) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt={salt!r} is not valid: use a string that is not empty, or leave it away")
    check_unicode("cache_salt", salt or "")
    return None if salt is None else str.__str__(salt)


def _parts_of(prompt: Any) -> tuple[Any, Any]:
    """Its text and its token ids, as far as they are given; where both are, the token ids count, as in vLLM."""
    if not isinstance(prompt, dict):
        return (prompt, None) if isinstance(prompt, str) else (None, prompt)
    for name, value in prompt.items():
        if name not in PROMPT_KEYS and value is not None:
            raise ValueError(f"prompt has the key {name!r}, which is not known: use {', '.join(PROMPT_KEYS)}")
    return prompt.get("prompt"), prompt.get("prompt_token_ids")
