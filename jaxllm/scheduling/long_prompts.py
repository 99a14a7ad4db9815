"""How much of long prompts one step computes, so that those who decode do not wait for more.

Invariant: in a step, prompts that are computed in several steps have `threshold` tokens together; only one that begins
in the step has a token more, as there is no row without tokens. A prompt of at most `threshold` tokens is computed whole.
"""

from __future__ import annotations

import sys


class LongPrompts:
    """What the step being planned may still compute of long prompts.

    Args:
        threshold: most tokens of a prompt that is not long; 0: none is.
    """

    def __init__(self, threshold: int = 0) -> None:
        self._threshold = threshold or sys.maxsize
        self._room = self._threshold

    def begin_step(self) -> None:
        self._room = self._threshold

    def begin(self, num_tokens: int, budget: int) -> int:
        """Tokens, one at least, to compute of a prompt that has `num_tokens` to go and takes its seat in this step."""
        chunk = min(num_tokens, budget)
        return chunk if num_tokens <= self._threshold else max(self.take(chunk), 1)

    def take(self, num_tokens: int) -> int:
        """Tokens to compute of a prompt that was begun in an earlier step, `num_tokens` at the most; maybe none."""
        taken = min(num_tokens, self._room)
        self._room -= taken
        return taken
