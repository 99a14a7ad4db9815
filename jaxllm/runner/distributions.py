"""Log-probabilities of all tokens, for requests that ask for more of them than steps find on the device.

An executable of its own for each bucket that returns hidden states, made only where the engine's `max_logprobs` lets
requests ask. Invariant: memory does not grow with the number of places: distributions of `CHUNK` places are computed
at a time, and of one step those of 2 * `AHEAD` chunks are on the device at the most (10 MB each at a vocabulary of
152,000).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from jaxllm.runner.logprob_seats import AnswerPlace, PromptPart
from jaxllm.sampling_params import PACKED_LOGPROBS
from jaxllm.scheduling.plan import PromptDetails, StepOutput

CHUNK = 16
"""Places whose distributions one call computes."""
AHEAD = 2
"""Calls under way while the host reads: one is computed while another one is copied."""


@dataclass(frozen=True)
class DistributionShape:
    """The padded shape of a call."""

    tokens: int
    """Of the step whose hidden states it takes."""

    @property
    def name(self) -> str:
        return f"distributions-{self.tokens}"

    @property
    def num_indices(self) -> int:
        return CHUNK

    def compute(
        self, model: Decoder, hidden: Float[Array, "tokens hidden"], places: Int[Array, " places"]
    ) -> Float[Array, "places vocab"]:
        """Float32 log-probabilities of every token to follow the tokens at these places of a step."""
        normalize = jax.shard_map(
            partial(_normalize, backend=model.setting.backend),
            mesh=model.setting.mesh,
            in_specs=REPLICATED,
            out_specs=REPLICATED,
            check_vma=False,
        )
        return normalize(model.logits(hidden[places]))


def _normalize(logits: Array, *, backend: Backend) -> Array:
    summary = summarize(logits, jnp.ones(len(logits)), backend=backend)
    return logits.astype(jnp.float32) - summary.log_total[:, None]


def may_be_wanted(max_logprobs: int, vocab_size: int) -> bool:
    """Some request of an engine may ask for distributions."""
    return max_logprobs == -1 or max_logprobs > PACKED_LOGPROBS or max_logprobs >= vocab_size


class PendingDistributions:
    """Distributions of a step, computed and brought to the host a chunk at a time while they are read.

    Args:
        compute: takes int32 [CHUNK] places, returns float32 [CHUNK, vocab].
        parts: prompts.
        places: where rows sample.
    """

    def __init__(
        self, compute: Callable[[np.ndarray], jax.Array], parts: Sequence[PromptPart], places: Sequence[AnswerPlace]
    ) -> None:
        self._compute = compute
        self._parts, self._places = parts, places
        indices = [part.first + offset for part in parts for offset in range(len(part.token_ids))]
        indices += [one.place for one in places]
        padded = np.zeros(-(-len(indices) // CHUNK) * CHUNK, np.int32)
        padded[: len(indices)] = indices
        self._chunks = padded.reshape(-1, CHUNK)
        self._begun = [self._start(chunk) for chunk in self._chunks[:AHEAD]]

    def add_to(self, output: StepOutput) -> None:
        """Waits for them; gives a step's output the details of their tokens."""
        found = self._read()
        for part in self._parts:
            details = [find_details(next(found), token_id, part.num_top) for token_id in part.token_ids]
            output.prompts.append(PromptDetails(part.row, part.position, details))
        for one in self._places:
            (token_id,) = output.token_ids[one.row]
            output.details[one.row] = [find_details(next(found), token_id, one.num_top)]

    def _read(self) -> Iterator[np.ndarray]:
        """All of them. From the first on, each time: a reading that was interrupted is begun again."""
        under_way = deque(self._begun)
        for index in range(len(self._chunks)):
            distributions = np.asarray(under_way.popleft())
            if index + AHEAD < len(self._chunks):
                under_way.append(self._start(self._chunks[index + AHEAD]))
            yield from distributions

    def _start(self, chunk: np.ndarray) -> jax.Array:
        computed = self._compute(chunk)
        computed.copy_to_host_async()
        return computed


def find_details(logprobs: np.ndarray, token_id: int, num_top: int) -> TokenDetails:
    """What is told of a token.

    Args:
        logprobs: float32 [vocab], of every token at its position.
        token_id: the token that came.
        num_top: most likely tokens that are wanted; -1: all.
    """
    chosen = logprobs[token_id]
    top = _find_best(logprobs, num_top)
    return TokenDetails(float(chosen), int(np.count_nonzero(logprobs >= chosen)), top.tolist(), logprobs[top].tolist())


def _find_best(logprobs: np.ndarray, count: int) -> np.ndarray:
    """The most likely tokens, of equals the smaller id first."""
    if not 0 <= count < len(logprobs):
        return _sort(logprobs, np.arange(len(logprobs)))
    least = -np.partition(-logprobs, count - 1)[count - 1]
    candidates = np.flatnonzero(logprobs >= least)
    return _sort(logprobs[candidates], candidates)[:count]


def _sort(logprobs: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Tokens by their float32 log-probabilities. Four times faster than a stable sort of 152,000 floats."""
    bits = (np.float32(0) - logprobs).view(np.int32)
    # As whole numbers, negative floats are in the wrong order.
    ascending = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    return np.sort(ascending << 32 | token_ids) & 0xFFFFFFFF
