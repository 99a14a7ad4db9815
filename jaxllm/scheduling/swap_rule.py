"""Whether a preempted request's K/V are swapped out or computed again.

Invariant: the answer follows from the numbers given, so that the same engine decides the same way every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config import PreemptionMode
from jaxllm.memory import SwapCosts


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
