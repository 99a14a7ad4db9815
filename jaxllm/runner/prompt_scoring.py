"""Log-probabilities of the tokens of prompts, from the hidden states that a step computed anyway.

An executable of its own for each bucket that prompts are computed in. Invariant: memory does not grow with prompt
times vocabulary: logits exist for `CHUNK` tokens at a time, and what is left of a token are 2 * `PACKED_LOGPROBS` + 2
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.kernels.backend import Backend
from jaxllm.kernels.sampling import summarize
from jaxllm.models.transformer import Decoder
from jaxllm.outputs import TokenDetails
from jaxllm.parallel.sharding import REPLICATED
from jaxllm.runner.logprob_seats import PromptPart
from jaxllm.runner.token_details import PACKED_WIDTH, describe_tokens, unpack_details
from jaxllm.scheduling.plan import PromptDetails, StepOutput

CHUNK = 128
"""Tokens whose logits exist at the same time: 78 MB at a vocabulary of 152,000."""


@dataclass(frozen=True)
class ScoringShape:
    """The padded shape of a call."""

    tokens: int

    @property
    def name(self) -> str:
        return f"prompt_logprobs-{self.tokens}"

    @property
    def num_indices(self) -> int:
        return self.tokens

    def compute(
        self, model: Decoder, hidden: Float[Array, "tokens hidden"], targets: Int[Array, " tokens"]
    ) -> Int[Array, "tokens packed+1"]:
        """For each token of a step, how likely the token `targets` names was to follow it.

        Returns:
            The bits of its float32 log-probability, and its packed `Details`.
        """
        tokens = len(targets)
        chunk = min(CHUNK, tokens)
        describe = jax.shard_map(
            partial(_describe, backend=model.setting.backend),
            mesh=model.setting.mesh,
            in_specs=REPLICATED,
            out_specs=REPLICATED,
            check_vma=False,
        )

        def score(index: Array, scores: Array) -> Array:
            # The last chunk begins earlier, so that it is a whole one.
            start = jnp.minimum(index * chunk, tokens - chunk)
            part = jax.lax.dynamic_slice_in_dim(hidden, start, chunk)
            described = describe(model.logits(part), jax.lax.dynamic_slice_in_dim(targets, start, chunk))
            return jax.lax.dynamic_update_slice_in_dim(scores, described, start, axis=0)

        return jax.lax.fori_loop(0, -(-tokens // chunk), score, jnp.zeros((tokens, PACKED_WIDTH + 1), jnp.int32))


def _describe(logits: Array, targets: Array, *, backend: Backend) -> Array:
    summary = summarize(logits, jnp.ones(len(logits)), backend=backend)
    details = describe_tokens(logits, summary, targets, backend=backend)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(chosen - summary.log_total[:, None], jnp.int32)
    return jnp.concatenate([bits, details.pack()], axis=1)


@dataclass(frozen=True)
class PendingScores:
    """Scores of prompts on their way to the host."""

    scores: jax.Array
    parts: Sequence[PromptPart]

    def add_to(self, output: StepOutput) -> None:
        """Waits for them; gives a step's output the details of each part's tokens."""
        scores = np.asarray(self.scores)
        for part in self.parts:
            details = _unpack(scores[part.first :][: len(part.token_ids)], part.num_top)
            output.prompts.append(PromptDetails(part.row, part.position, details))


def launch_scoring(
    score: Callable[[jax.Array, np.ndarray], jax.Array], hidden: jax.Array, parts: Sequence[PromptPart]
) -> PendingScores:
    """Starts the scoring of what a step computed of prompts; `score` takes hidden states and targets."""
    targets = np.zeros(hidden.shape[0], np.int32)
    for part in parts:
        targets[part.first :][: len(part.token_ids)] = part.token_ids
    scores = score(hidden, targets)
    scores.copy_to_host_async()
    return PendingScores(scores, parts)


def _unpack(scores: np.ndarray, count: int) -> list[TokenDetails]:
    logprobs = np.ascontiguousarray(scores[:, 0]).view(np.float32).tolist()
    return unpack_details(scores[:, 1:], logprobs, count)
