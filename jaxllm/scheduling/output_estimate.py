"""How long an answer will probably be, learnt from those that ended.

Invariant: an estimate lies between the fewest and the most tokens that the request can get; it is a guess, and
nothing breaks if it is wrong.
"""

from __future__ import annotations

from jaxllm.request import Request

PRIOR_TOKENS = 256.0
"""The guess before any answer ended."""
PRIOR_WEIGHT = 8
"""Answers that the wider average counts for in the narrower one: all answers in those of a class, the prior in all."""
MEMORY = 256
"""Answers that an average remembers: with more, the newest counts 1/256."""


class RunningMean:
    """An average that follows what changes slowly."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value = value
        self.count = count
        """Values it is made of, `MEMORY` at the most."""

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        self.value += (value - self.value) / self.count


class OutputEstimate:
    """Average lengths of answers, by classes of prompts whose lengths have the same power of two below them."""

    def __init__(self) -> None:
        self._all = RunningMean(PRIOR_TOKENS, PRIOR_WEIGHT)
        self._classes: dict[int, RunningMean] = {}

    def learn(self, request: Request) -> None:
        """A request got its whole answer."""
        num_tokens = len(request.output_ids)
        self._all.add(num_tokens)
        self._classes.setdefault(request.prompt_len.bit_length(), RunningMean()).add(num_tokens)

    def expect(self, request: Request) -> float:
        """Tokens that a request's answer will have."""
        expected, own = self._all.value, self._classes.get(request.prompt_len.bit_length())
        if own is not None:
            expected = (own.count * own.value + PRIOR_WEIGHT * expected) / (own.count + PRIOR_WEIGHT)
        return max(min(expected, request.max_len - request.prompt_len), request.params.min_tokens)
