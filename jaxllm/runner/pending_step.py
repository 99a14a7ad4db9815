"""A step on its way: launched, and not read yet.

`PendingStep.result` is the only blocking read of what steps compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxllm.runner.distributions import PendingDistributions
from jaxllm.runner.prompt_scoring import PendingScores
from jaxllm.runner.token_details import unpack_details
from jaxllm.scheduling.plan import StepOutput


@dataclass(frozen=True)
class PendingStep:
    """A launched step whose result is on its way to the host."""

    output: Any
    """Array [steps, 2, rows]."""
    num_rows: int
    num_steps: int = 1
    details: jax.Array | None = None
    wanted: Mapping[int, int] = field(default_factory=dict)
    """Rows whose details are wanted, and of how many of the most likely tokens."""
    scores: Sequence[PendingScores | PendingDistributions] = ()

    @property
    def is_ready(self) -> bool:
        """The device is done with it."""
        return self.output.is_ready()

    def result(self) -> StepOutput:
        """Waits for the step; token ids and log-probabilities by row."""
        taken = np.asarray(self.output)[: self.num_steps, :, : self.num_rows]
        token_ids, bits = np.ascontiguousarray(taken.transpose(1, 2, 0))
        logprobs = bits.view(np.float32).tolist()
        output = StepOutput(token_ids.tolist(), logprobs)
        if self.details is not None:
            packed = np.asarray(self.details)[: self.num_steps]
            for row, count in self.wanted.items():
                output.details[row] = unpack_details(packed[:, row], logprobs[row], count)
        for scores in self.scores:
            scores.add_to(output)
        return output
