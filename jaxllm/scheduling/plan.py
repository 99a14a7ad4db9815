"""The step plan: all that passes from the scheduler to the runner, and the result that comes back.

A plan says what to compute, never how: buckets, padding and packing are the runner's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxllm.request import Request


@dataclass(slots=True)
class PlanRow:
    """One request's part of a step: compute tokens [start, start + num_tokens) of it.

    Nobody changes a row once it is made. It is not frozen because making 256 frozen rows a step
    would take longer than all the rest of scheduling.
    """

    request: Request
    seat: int
    start: int
    num_tokens: int
    num_known: int
    """Known tokens when the plan was made. A row with `start >= num_known` has one token, the seat's last
    sampled one, which is still on the device; the tokens of every other row are all known."""
    first_new_block: int
    """Index in the request's block table of the first of `new_block_ids`; 0 if there are none."""
    new_block_ids: tuple[int, ...]
    """Blocks the device was not told of yet: the whole table if the request takes its seat."""
    admitted: bool
    """The request took its seat in this step: the seat's state on the device is stale."""
    samples: bool
    """The row reaches the request's last existing token, so the step samples the next one."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, in row order."""

    rows: tuple[PlanRow, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class StepOutput:
    """What one step sampled, aligned with the plan's rows; rows that did not sample hold nothing of use."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
