"""Beam search: the most likely answers, as transformers finds and scores them.

Each round is a request of one token for every hypothesis; its K/V come from the prefix cache, where hypotheses share
what they have in common, so that a round computes the last block at most. `BeamSearch` has the search's rules and
knows no engine. Invariant: `running` and `finished` never hold more than `beam_width` hypotheses, best first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.outputs import BeamSearchSequence
from jaxllm.sampling_params import BeamSearchParams


class Hypothesis(NamedTuple):
    """The beginning of an answer, or a whole one."""

    token_ids: tuple[int, ...]
    logprob: float
    """Sum over its tokens."""


class Candidate(NamedTuple):
    """A token that may follow a hypothesis."""

    token_id: int
    logprob: float


class BeamSearch:
    """The search for answers to one prompt.

    Args:
        prompt_ids: the prompt.
        params: how to search.
        eos_token_ids: tokens that end an answer.
        max_tokens: most tokens of an answer.
        max_logprobs: most candidates that the engine tells of a token; -1 is no limit.

    Raises:
        ValueError: more candidates are needed than the engine tells.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: frozenset[int],
        max_tokens: int,
        max_logprobs: int,
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.running = [Hypothesis((), 0.0)]
        self.finished: list[tuple[float, Hypothesis]] = []
        """With their scores."""
        self.is_over = False
        self._params = params
        self._eos_token_ids = frozenset[int]() if params.ignore_eos else eos_token_ids
        self._max_tokens = max_tokens
        # So many that enough go on even if all ends of all hypotheses are among the best.
        per_beam = max(2, 1 + len(self._eos_token_ids))
        self.num_candidates = per_beam * params.beam_width
        if self.num_candidates > max_logprobs != -1:
            raise ValueError(
                f"beam_width={params.beam_width} needs {self.num_candidates} candidates a token with "
                f"{len(self._eos_token_ids)} end tokens, but max_logprobs={max_logprobs} are told: "
                f"use at most {max_logprobs // per_beam}, or start the engine with max_logprobs=-1"
            )

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> None:
        """Goes on by one token.

        Args:
            candidates: for each running hypothesis the `num_candidates` most likely tokens.
        """
        width = self._params.beam_width
        pool = [
            (hypothesis.logprob + candidate.logprob, beam, candidate.token_id)
            for beam, hypothesis in enumerate(self.running)
            for candidate in candidates[beam]
        ]
        pool.sort(key=lambda one: (-one[0], one[1:]))
        extended = [
            Hypothesis((*self.running[beam].token_ids, token_id), logprob) for logprob, beam, token_id in pool
        ][: self.num_candidates]  # fmt: skip
        # Those behind the best ones are there only so that enough go on.
        self._finish([one for one in extended[:width] if self._ends(one)])
        self.running = [one for one in extended if not self._ends(one)][:width]
        self.is_over = not self.running or not self._may_improve()

    def sequences(self) -> list[BeamSearchSequence]:
        """The best answers, best first."""
        found = []
        for score, hypothesis in self.finished:
            ends = hypothesis.token_ids[-1] in self._eos_token_ids
            tokens = [*self.prompt_ids, *hypothesis.token_ids]
            found.append(
                BeamSearchSequence(tokens, hypothesis.logprob, score, finish_reason="stop" if ends else "length")
            )
        return found

    def _ends(self, hypothesis: Hypothesis) -> bool:
        return hypothesis.token_ids[-1] in self._eos_token_ids or len(hypothesis.token_ids) >= self._max_tokens

    def _finish(self, hypotheses: Sequence[Hypothesis]) -> None:
        self.finished += [(self._score(one.logprob, len(one.token_ids)), one) for one in hypotheses]
        self.finished.sort(key=lambda one: -one[0])
        del self.finished[self._params.beam_width :]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self._params.length_penalty

    def _may_improve(self) -> bool:
        """Whether a running hypothesis may still become better than a finished one, by transformers' estimates."""
        if len(self.finished) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        best = self.running[0]
        is_patient = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._max_tokens if is_patient else len(best.token_ids)
        return self._score(best.logprob, length) > self.finished[-1][0]
