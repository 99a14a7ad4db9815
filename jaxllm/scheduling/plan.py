"""The step plan: all that passes from the scheduler to the runner, and the result that comes back.

A plan says what to compute, never how: buckets, padding and packing are the runner's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxllm.outputs import TokenDetails
from jaxllm.request import Request


class BlockCopy(NamedTuple):
    """A block whose contents, as earlier steps left them, are needed in another one."""

    source: int
    destination: int


class SwapOut(NamedTuple):
    """Blocks whose contents, as earlier steps left them, become a chunk of host memory."""

    chunk: int
    block_ids: tuple[int, ...]
    """Not more than a chunk has rows: the first block becomes row 0."""


class SwapIn(NamedTuple):
    """Rows of a chunk of host memory whose contents are needed in blocks."""

    chunk: int
    rows: tuple[int, ...]
    block_ids: tuple[int, ...]
    """One for each row."""


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
    num_steps: int = 1
    """Steps of one token each that the device does one after the other, each with the token sampled before."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, in row order."""

    rows: tuple[PlanRow, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    """To be made before the step writes anything; no destination is a source."""
    swap_out: tuple[SwapOut, ...] = ()
    """To be made, in this order, before anything else of this plan."""
    swap_in: tuple[SwapIn, ...] = ()
    """To be made after those, and before `copies`."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_steps(self) -> int:
        """Steps that the device does in one call."""
        return max(row.num_steps for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)


class PromptDetails(NamedTuple):
    """What a step found out about tokens of a row's prompt."""

    row: int
    position: int
    """Of the first of them, in the prompt."""
    details: list[TokenDetails]


@dataclass(frozen=True)
class StepOutput:
    """What a plan's steps sampled, aligned with its rows: `num_steps` tokens of each.

    Rows that did not sample hold nothing of use, and so does what follows a row's last step.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    details: dict[int, list[TokenDetails]] = field(default_factory=dict)
    """Of the tokens of rows that ask for them."""
    prompts: list[PromptDetails] = field(default_factory=list)
    """Of prompts that are to be scored."""
