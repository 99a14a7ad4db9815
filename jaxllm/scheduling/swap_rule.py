"""What is copied to host memory: a preempted request's K/V, and cached blocks that the device needs for others.

Invariant: the answer follows from the numbers given, so that the same engine decides the same way every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import PreemptionMode
from jaxllm.memory import SwapCosts

WORTH_KEEPING = 2.0
"""How many times a copy's cost computing has to take: evicted blocks are all copied, and few are wanted again."""


@dataclass(frozen=True)
class SwapRule:
    """`preemption_mode`, with what "auto" compares."""

    mode: PreemptionMode = "swap"
    costs: SwapCosts | None = None
    """None: nothing was measured, and "auto" swaps nobody out."""

    def swaps(self, num_tokens: int, chunks_out: int, chunks_in: int) -> bool:
        """Whether a request is swapped out.

        Args:
            num_tokens: whose K/V would have to be computed again.
            chunks_out: transfers to the host that swapping takes; blocks whose host copy is current need none.
            chunks_in: transfers that bring it back.
        """
        if self.mode != "auto" or self.costs is None:
            return self.mode == "swap"
        return self.costs.of_swap(chunks_out, chunks_in) < self.costs.of_computing(num_tokens)

    def keeps_evicted(self, chunk_tokens: int) -> bool:
        """Whether cached blocks are copied when the device needs them; of a small model they are computed as fast.

        Args:
            chunk_tokens: whose K/V one transfer moves.
        """
        if self.costs is None:
            return True
        return WORTH_KEEPING * self.costs.of_swap(1, 1) < self.costs.of_computing(chunk_tokens)
