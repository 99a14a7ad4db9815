"""How one request is sampled and when it stops. Names and defaults are vLLM's."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_ANSWERS = 1024
"""Answers to one prompt."""
MAX_SUPPRESSED_TOKEN_IDS = 32
"""Stop tokens (end-of-sequence tokens included) that `min_tokens` can hold back."""
MAX_LOGIT_BIASES = 1024
"""Tokens in a request's `logit_bias`."""
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 16
"""Spellings of a request's `bad_words` (a word counts twice if it is another token after a space), and tokens of each."""
MAX_STOP_STRINGS = 128
"""Of a request: each is looked for after every token."""
PACKED_LOGPROBS = 20
"""Most likely tokens that steps find on the device. Those of requests that want more are found on the host."""

SAMPLING_TOPICS = {"sampling": "temperature", "stopping": "max_tokens", "answers": "n"}
"""What the fields of `SamplingParams` are about: a topic begins at the field named here, as in `ENGINE_TOPICS`."""


class RequestOutputKind(enum.Enum):
    """What the outputs of a request hold."""

    CUMULATIVE = 0
    """After every step: all that was generated so far."""
    DELTA = 1
    """After every step: what was generated since the last output."""
    FINAL_ONLY = 2
    """Everything, in one output at the end."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; checked when it is made.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and the remedy.
        TypeError: a keyword that is not a field.
    """

    temperature: float = 1.0
    """0 takes the most likely token (greedy); above, logits are divided by it."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability adds up to this; 1 is all."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 or -1 is all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the most likely one, before top_k and top_p; 0 is none."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs in the batch; by default one is drawn."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the answer so far become less likely."""
    presence_penalty: float = 0.0
    """What the logit of a token loses once it came in the answer; from -2 to 2."""
    frequency_penalty: float = 0.0
    """What the logit of a token loses each time it came in the answer; from -2 to 2."""
    logit_bias: Mapping[int, float] | None = None
    """What is added to the logits of tokens, from -100 (hardly ever) to 100, by token id; by default nothing."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that can come; by default all can."""
    bad_words: Sequence[str] = ()
    """Texts that cannot come: the token that would complete one, at the beginning of a word or in it, is left out."""

    max_tokens: int | None = 16
    """Most tokens to generate; None is up to max_model_len."""
    min_tokens: int = 0
    """Tokens to generate before a stop token or end-of-sequence token may come."""
    stop: str | Sequence[str] = ()
    """Text that ends the answer; it is not part of the answer."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the answer."""

    n: int = 1
    """Answers to the prompt, which is computed once; under a seed, answer i is that of seed + i alone."""
    logprobs: int | None = None
    """Report log-probabilities: of each token of the answer, and of this many most likely ones; -1 is all tokens there
    are; by default none. They are those of the model itself, before any parameter applies. The engine's `max_logprobs`
    is the limit."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, all but the first; by default none. Such a prompt is computed whole, cached
    or not."""
    detokenize: bool = True
    """Make text of the tokens; without it answers are token ids only."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """False: where special tokens are part of the text and follow each other, leave out spaces that the tokenizer's
    decoder puts between them."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What `LLMEngine.step` returns for the request; `LLM` always returns finished answers."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) not in _PLAIN and isinstance(value, numbers.Real):
                object.__setattr__(self, name, _as_plain(name, value))
        object.__setattr__(self, "stop", _as_tuple("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", _as_tuple("bad_words", self.bad_words))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        self._check_sampling()
        self._check_logits()
        self._check_stopping()
        self._check_output()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalizes(self) -> bool:
        """What came before changes what may come."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _check_sampling(self) -> None:
        _check("temperature", self.temperature, float, lambda v: 0 <= v < math.inf, "0 (greedy) or above")
        _check("top_p", self.top_p, float, lambda v: 0 < v <= 1, "above 0 and at most 1 (1 keeps every token)")
        _check("top_k", self.top_k, int, lambda v: v >= -1, "a whole number of 1 or above, or 0 for every token")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            float,
            lambda v: 0 < v < math.inf,
            "a number above 0 (1 is off)",
        )
        _check("min_p", self.min_p, float, lambda v: 0 <= v <= 1, "from 0 (every token) to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), float, lambda v: -2 <= v <= 2, "a number from -2 to 2 (0 is off)")
        if self.seed is not None:
            _check("seed", self.seed, int, lambda v: True, "a whole number, or None for one that is drawn")

    def _check_logits(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias={self.logit_bias!r} is not valid: use a dictionary of biases by token id")
            if len(self.logit_bias) > MAX_LOGIT_BIASES:
                raise ValueError(f"logit_bias has {len(self.logit_bias)} tokens: give {MAX_LOGIT_BIASES} at the most")
            for token, bias in self.logit_bias.items():
                _check("logit_bias: token", token, int, lambda v: v >= 0, "token ids of 0 or above")
                _check(f"logit_bias[{token}]", bias, float, lambda v: -100 <= v <= 100, "a number from -100 to 100")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=[] allows no token at all: name some, or use None for every token")
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words has {len(self.bad_words)} words: give {MAX_BAD_WORDS} at the most")
        for word in self.bad_words:
            _check("bad_words", word, str, lambda v: v.strip() != "", "texts that are more than spaces")

    def _check_stopping(self) -> None:
        if self.max_tokens is not None:
            remedy = "a whole number of 1 or above, or None for no limit"
            _check("max_tokens", self.max_tokens, int, lambda v: v >= 1, remedy)
        _check("min_tokens", self.min_tokens, int, lambda v: v >= 0, "a whole number of 0 or above")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: "
                "raise max_tokens or lower min_tokens"
            )
        self._check_switches("ignore_eos", "include_stop_str_in_output")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(self.stop)} strings: give {MAX_STOP_STRINGS} at the most")
        for text in self.stop:
            _check("stop", text, str, lambda v: v != "", "strings that are not empty")
        _check_token_ids("stop_token_ids", self.stop_token_ids)

    def _check_output(self) -> None:
        remedy = f"a whole number from 1 to {MAX_ANSWERS}"
        _check("n", self.n, int, lambda v: 1 <= v <= MAX_ANSWERS, remedy)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                remedy = "a number of tokens of 0 or above, -1 for all, or None"
                _check(name, getattr(self, name), int, lambda v: v >= -1, remedy)
        self._check_switches("detokenize", "skip_special_tokens", "spaces_between_special_tokens")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs text: leave detokenize=True, or use stop_token_ids")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} is not valid: use a RequestOutputKind")

    def _check_switches(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not valid: use True or False")


@dataclass(frozen=True)
class BeamSearchParams:
    """How beam search looks for the most likely answers; checked when it is made.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and the remedy.
        TypeError: a keyword that is not a field.
    """

    beam_width: int
    """Hypotheses that are kept, and answers that are returned."""
    max_tokens: int
    """Most tokens of an answer."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    temperature: float = 0.0
    """Only 0: beam search does not sample."""
    length_penalty: float = 1.0
    """Answers are compared by their log-probability divided by this power of their length."""
    early_stopping: bool | Literal["never"] = False
    """True: end with `beam_width` answers. False: end when none of the running is better now. "never": end when none
    can become better."""

    def __post_init__(self) -> None:
        _check("beam_width", self.beam_width, int, lambda v: v >= 1, "a whole number of 1 or above")
        _check("max_tokens", self.max_tokens, int, lambda v: v >= 1, "a whole number of 1 or above")
        _check("length_penalty", self.length_penalty, float, lambda v: -50 <= v <= 50, "a number from -50 to 50")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} is not valid: use True or False")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping={self.early_stopping!r} is not valid: use True, False or 'never'")
        if self.temperature != 0:
            raise ValueError(f"temperature={self.temperature!r} is not supported by beam search: use 0")


def is_wide(num_logprobs: int | None) -> bool:
    """More of the most likely tokens are wanted than steps find on the device."""
    return num_logprobs is not None and (num_logprobs < 0 or num_logprobs > PACKED_LOGPROBS)


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if values is not None and (isinstance(values, str) or not isinstance(values, Iterable)):
        raise ValueError(f"{name}={values!r} is not valid: use a list")
    # Texts as such: enumerations of them are the caller's own, and an engine's process may not know those.
    return () if values is None else tuple([str.__str__(one) if isinstance(one, str) else one for one in values])


def _check(name: str, value: Any, kind: type, accepts: Callable[[Any], bool], remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, _ABSTRACT[kind]) or not accepts(value):
        raise ValueError(f"{name}={value!r} is not valid: use {remedy}")


def _check_token_ids(name: str, token_ids: Iterable[Any]) -> None:
    for token in token_ids:
        if type(token) is not int or token < 0:  # the usual ones, of which there can be many, cost nearly nothing
            _check(name, token, int, lambda v: v >= 0, "token ids of 0 or above")


def _as_plain(name: str, value: numbers.Real) -> int | float:
    """Python's number for one of NumPy's, whose sums overflow, or of an enumeration."""
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except OverflowError as error:
        raise ValueError(f"{name}={value!r} is not valid: use a smaller number") from error


_PLAIN = (bool, int, float, str, tuple, list, dict, type(None))
_ABSTRACT = {float: numbers.Real, int: numbers.Integral, str: str}
"""NumPy's numbers are as good as Python's."""
