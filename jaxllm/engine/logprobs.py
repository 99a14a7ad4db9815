"""Log-probabilities of tokens as callers get them (vLLM's form): for each token a dictionary by token id.

Invariant: the token that came is the first entry, then the most likely ones in order, it may be among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxllm.engine.detokenizer import TextVocabulary
from jaxllm.outputs import Logprob, TokenDetails, TokenOutput
from jaxllm.scheduling.plan import StepOutput, StepPlan


def attach_details(plan: StepPlan, output: StepOutput, token_outputs: Iterable[TokenOutput]) -> None:
    """Puts what a step found out about tokens into the outputs of their requests.

    A prompt's part waits at its request until the first token of the answer is read.
    """
    for part in output.prompts:
        details = plan.rows[part.row].request.prompt_details
        if details is not None:
            details[part.position - 1 :] = part.details  # a chunk that a preemption repeats takes its old place
    rows = {row.request.request_id: index for index, row in enumerate(plan.rows)}
    for token_output in token_outputs:
        index = rows[token_output.request_id]
        request = plan.rows[index].request
        if index in output.details:
            token_output.new_details = output.details[index][: len(token_output.new_token_ids)]
        token_output.prompt_details, request.prompt_details = request.prompt_details, None


class LogprobWriter:
    """Makes the dictionaries of one answer.

    Args:
        vocabulary: of the texts of tokens; None leaves them out.
    """

    def __init__(self, vocabulary: TextVocabulary | None) -> None:
        self._vocabulary = vocabulary

    def write(self, token_ids: Iterable[int], details: Iterable[TokenDetails]) -> list[dict[int, Logprob]]:
        """Of these tokens."""
        return [self._write(token_id, one) for token_id, one in zip(token_ids, details, strict=True)]

    def write_prompt(
        self, prompt_ids: Sequence[int], details: Sequence[TokenDetails]
    ) -> list[dict[int, Logprob] | None]:
        """Of a prompt, whose first token has none."""
        return [None, *self.write(prompt_ids[1:], details)]

    def _write(self, token_id: int, details: TokenDetails) -> dict[int, Logprob]:
        found = {token_id: self._make(token_id, details.logprob, details.rank)}
        best = zip(details.top_token_ids, details.top_logprobs, strict=True)
        for rank, (other, logprob) in enumerate(best, 1):
            if other not in found:
                found[other] = self._make(other, logprob, rank)
        return found

    def _make(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = None if self._vocabulary is None else self._vocabulary.name(token_id)
        return Logprob(logprob, rank, text)
