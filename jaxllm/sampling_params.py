"""How one request is sampled and when it stops. Names and defaults are vLLM's."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_ANSWERS = 1024
"""Answers to one prompt."""
MAX_SUPPRESSED_TOKEN_IDS = 32
"""Stop tokens (end-of-sequence tokens included) that `min_tokens` can hold back."""

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
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs in the batch; by default one is drawn."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the answer so far become less likely."""

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

    n: int = 1
    """Answers to the prompt, which is computed once; under a seed, answer i is that of seed + i alone."""
    detokenize: bool = True
    """Make text of the tokens; without it answers are token ids only."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What `LLMEngine.step` returns for the request; `LLM` always returns finished answers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        self._check_sampling()
        self._check_stopping()
        self._check_output()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

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
        if self.seed is not None:
            _check("seed", self.seed, int, lambda v: True, "a whole number, or None for one that is drawn")

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
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} is not valid: use True or False")
        for text in self.stop:
            _check("stop", text, str, lambda v: v != "", "strings that are not empty")
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, int, lambda v: v >= 0, "token ids of 0 or above")

    def _check_output(self) -> None:
        remedy = f"a whole number from 1 to {MAX_ANSWERS}"
        _check("n", self.n, int, lambda v: 1 <= v <= MAX_ANSWERS, remedy)
        if not isinstance(self.detokenize, bool):
            raise ValueError(f"detokenize={self.detokenize!r} is not valid: use True or False")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs text: leave detokenize=True, or use stop_token_ids")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} is not valid: use a RequestOutputKind")


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if values is not None and not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} is not valid: use a list")
    return tuple(values or ())


def _check(name: str, value: Any, kind: type, accepts: Callable[[Any], bool], remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, _ABSTRACT[kind]) or not accepts(value):
        raise ValueError(f"{name}={value!r} is not valid: use {remedy}")


_ABSTRACT = {float: numbers.Real, int: numbers.Integral, str: str}
"""NumPy's numbers are as good as Python's."""
