"""Which seats ask for log-probabilities, so that steps without them look at no row.

Invariant: what is known of a seat is that of its present request, from the plan that seats it on.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.sampling_params import is_wide
from jaxllm.scheduling.plan import PlanRow, StepPlan


class PromptPart(NamedTuple):
    """Tokens of a step, of a prompt whose log-probabilities are wanted; each scores the token after it."""

    row: int
    """Index in the plan."""
    first: int
    """Place of the part's first token among all tokens of the step."""
    position: int
    """Of the first token that is scored, in the prompt."""
    token_ids: tuple[int, ...]
    """Those that are scored; none behind a prompt's last token."""
    num_top: int
    """Most likely tokens that are wanted; -1: all."""


class AnswerPlace(NamedTuple):
    """Where a row samples a token of which more is wanted than steps find on the device."""

    row: int
    """Index in the plan."""
    place: int
    """Of the row's last token, among all tokens of the step."""
    num_top: int
    """Most likely tokens that are wanted; -1: all."""


class LogprobSeats:
    """The seats of one engine."""

    def __init__(self) -> None:
        self._answers: dict[int, int] = {}
        """How many of the most likely tokens are wanted, by seat, where steps find as many."""
        self._wide_answers: dict[int, int] = {}
        """The same where they do not."""
        self._prompts: set[int] = set()
        """Seats whose prompts are not scored yet."""

    def note(self, plan: StepPlan) -> None:
        """Requests take their seats."""
        for row in plan.rows:
            if row.admitted:
                self._note(row)

    def wanted_answers(self, plan: StepPlan) -> dict[int, int]:
        """How many of the most likely tokens are wanted, by row of the plan, where the step finds as many."""
        if not self._answers:
            return {}
        return {
            index: self._answers[row.seat] for index, row in enumerate(plan.rows) if row.samples and row.seat in self._answers
        }  # fmt: skip

    def wanted_places(self, plan: StepPlan) -> list[AnswerPlace]:
        """Where the plan's rows sample tokens of which more is wanted."""
        places: list[AnswerPlace] = []
        if not self._wide_answers:
            return places
        end = 0
        for index, row in enumerate(plan.rows):
            end += row.num_tokens
            if row.samples and row.seat in self._wide_answers:
                places.append(AnswerPlace(index, end - 1, self._wide_answers[row.seat]))
        return places

    def wanted_prompts(self, plan: StepPlan) -> list[PromptPart]:
        """What the plan's step computes of prompts that are to be scored."""
        parts: list[PromptPart] = []
        if not self._prompts:
            return parts
        first = 0
        for index, row in enumerate(plan.rows):
            if row.seat in self._prompts:
                request, position = row.request, row.start + 1
                token_ids = request.prompt_ids[position : row.end + 1]
                assert request.params.prompt_logprobs is not None, "another request has the seat"
                if row.end >= request.prompt_len:
                    self._prompts.discard(row.seat)
                if token_ids:  # none at the prompt's end, if that is all that is left
                    parts.append(PromptPart(index, first, position, token_ids, request.params.prompt_logprobs))
            first += row.num_tokens
        return parts

    def _note(self, row: PlanRow) -> None:
        request = row.request
        self._answers.pop(row.seat, None)
        self._wide_answers.pop(row.seat, None)
        self._prompts.discard(row.seat)
        if request.params.logprobs is not None:
            answers = self._wide_answers if is_wide(request.params.logprobs) else self._answers
            answers[row.seat] = request.params.logprobs
        # A fork's prompt is its parent's, and what is read already was scored before a preemption.
        if request.params.prompt_logprobs is not None and request.parent is None and not request.output_ids:
            self._prompts.add(row.seat)
