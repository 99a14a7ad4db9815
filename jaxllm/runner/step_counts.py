"""How many steps an engine launched, and how much of them was padding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepCounts:
    """Totals since the engine started; they only grow."""

    calls: int = 0
    steps: int = 0
    """Of the device; a call may do several."""
    tokens: int = 0
    """Tokens that the plans asked for."""
    padded_tokens: int = 0
    """Tokens of the buckets they were computed in."""

    @property
    def values(self) -> tuple[int, int, int]:
        return self.steps, self.tokens, self.padded_tokens

    def add(self, steps: int, tokens: int, padded_tokens: int) -> None:
        """One more call, with the tokens of all its steps."""
        self.calls += 1
        self.steps += steps
        self.tokens += tokens
        self.padded_tokens += padded_tokens
