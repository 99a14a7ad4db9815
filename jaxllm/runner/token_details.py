"""Log-probabilities of tokens: which were the most likely ones at a position, and the rank of the one that came.

Invariant: all is of the model's raw distribution. The most likely tokens are in order, of equals the smaller id first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.kernels.backend import Backend
from jaxllm.kernels.sampling import Summary, top_tokens
from jaxllm.outputs import TokenDetails
from jaxllm.sampling_params import PACKED_LOGPROBS


class Details(NamedTuple):
    """Of one token a row."""

    ranks: Int[Array, " rows"]
    """Tokens that are as likely or more, this one included."""
    token_ids: Int[Array, "rows top"]
    """The most likely ones."""
    logprobs: Float[Array, "rows top"]

    def pack(self) -> Int[Array, "rows 2*top+1"]:
        """As one array of int32 for the host."""
        bits = jax.lax.bitcast_convert_type(self.logprobs, jnp.int32)
        return jnp.concatenate([self.ranks[:, None], self.token_ids, bits], axis=1)


PACKED_WIDTH = 2 * PACKED_LOGPROBS + 1


def no_details(num_rows: int) -> Details:
    """What takes the place of details that nobody asks for."""
    top = jnp.zeros((num_rows, PACKED_LOGPROBS), jnp.int32)
    return Details(top[:, 0], top, top.astype(jnp.float32))


def describe_tokens(
    logits: Float[Array, "rows vocab"], summary: Summary, token_ids: Int[Array, " rows"], *, backend: Backend
) -> Details:
    """Details of a token of each row.

    Args:
        logits: raw, in any type.
        summary: of these logits.
        token_ids: which.
        backend: "xla" runs on any device, "pallas" on GPUs.
    """
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    ranks = jnp.sum(logits >= chosen, axis=-1, dtype=jnp.int32)
    values, top = top_tokens(logits, summary, min(PACKED_LOGPROBS, logits.shape[1]), backend=backend)
    missing = ((0, 0), (0, PACKED_LOGPROBS - top.shape[1]))
    logprobs = values - summary.log_total[:, None]
    return Details(ranks, jnp.pad(top, missing), jnp.pad(logprobs, missing, constant_values=-jnp.inf))


def unpack_details(packed: np.ndarray, logprobs: Sequence[float], count: int) -> list[TokenDetails]:
    """What the host makes of packed details.

    Args:
        packed: int32 [tokens, 2 * top + 1].
        logprobs: of the tokens that came.
        count: how many of the most likely tokens are wanted.
    """
    ranks, token_ids = packed[:, 0].tolist(), packed[:, 1 : 1 + count].tolist()
    start = 1 + PACKED_LOGPROBS
    values = np.ascontiguousarray(packed[:, start : start + count]).view(np.float32).tolist()
    return [TokenDetails(*parts) for parts in zip(logprobs, ranks, token_ids, values, strict=True)]
