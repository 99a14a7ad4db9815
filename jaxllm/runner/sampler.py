"""From logits to one token a row. Everything is per row, so a row's token never depends on its neighbours.

A step in which no row asks for more than the most likely token pays for no more: a branch, taken on the
device, decides. Its branches return token ids, never logits, which are too large to pass through.
Random numbers come from a key per request and the position of the token: the batch, its order and
preemption change nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.kernels.backend import Backend
from jaxllm.kernels.sampling import Summary, draw, find_threshold, summarize
from jaxllm.runner.device_state import SamplingState

MASKED = float("-inf")


class Sample(NamedTuple):
    """What a step sampled."""

    token_ids: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    """Log-probability of the token under the model's raw distribution, before any parameter applied."""


def sample(
    logits: Float[Array, "rows vocab"],
    sampling: SamplingState,
    seen: Bool[Array, "seats vocab"],
    seats: Int[Array, " rows"],
    lengths: Int[Array, " rows"],
    *,
    backend: Backend = "xla",
) -> Sample:
    """Chooses the token at position `lengths` of each row.

    Args:
        logits: raw, in any type; what is computed is float32.
        sampling: the rows' parameters.
        seen: tokens of each seat's prompt and answer; read where a row may need it.
        seats: of the rows.
        lengths: tokens of each row so far.
        backend: who computes; "xla" on any device, "pallas" on GPUs.
    """
    summary = summarize(logits, _inverse_temperature(sampling), backend=backend)
    draws = jnp.any(sampling.temperature != 0)
    changes = jnp.any((sampling.repetition_penalty != 1.0) | (lengths < sampling.min_len))
    token_ids = jax.lax.switch(
        jnp.where(changes, 2, draws.astype(jnp.int32)),
        (
            lambda: summary.most_likely,
            lambda: _choose(logits, summary, sampling, lengths, backend),
            lambda: _choose_adjusted(logits, sampling, seen[seats], lengths, backend),
        ),
    )
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    return Sample(token_ids, chosen.astype(jnp.float32) - summary.log_total)


def _choose_adjusted(
    logits: Array, sampling: SamplingState, seen: Array, lengths: Array, backend: Backend
) -> Int[Array, " rows"]:
    logits = logits.astype(jnp.float32)
    adjusted = _suppress_stops(_penalize(logits, sampling.repetition_penalty, seen), sampling, lengths)
    summary = summarize(adjusted, _inverse_temperature(sampling), backend=backend)
    return _choose(adjusted, summary, sampling, lengths, backend)


def _choose(
    logits: Array, summary: Summary, sampling: SamplingState, lengths: Array, backend: Backend
) -> Int[Array, " rows"]:
    """A sample of what top_k and top_p keep; greedy rows, which filter nothing, take the most likely."""
    greedy = sampling.temperature == 0
    scale = _inverse_temperature(sampling)
    top_k, top_p = jnp.where(greedy, 0, sampling.top_k), jnp.where(greedy, 1.0, sampling.top_p)
    threshold = find_threshold(logits, summary, scale, top_k, top_p, backend=backend)
    threshold = jnp.where(greedy, jnp.inf, threshold)
    drawn = draw(logits, summary.peak, scale, threshold, sampling.key, lengths, backend=backend)
    return jnp.where(greedy, summary.most_likely, drawn)


def _inverse_temperature(sampling: SamplingState) -> Float[Array, " rows"]:
    return 1 / jnp.where(sampling.temperature == 0, 1.0, sampling.temperature)


def _penalize(logits: Array, penalty: Float[Array, " rows"], seen: Bool[Array, "rows vocab"]) -> Array:
    """Divides positive logits of seen tokens by the penalty and multiplies negative ones (arXiv:1909.05858)."""
    factor = jnp.where(seen, penalty[:, None], 1.0)
    return jnp.where(logits > 0, logits / factor, logits * factor)


def _suppress_stops(logits: Array, sampling: SamplingState, lengths: Array) -> Array:
    """Masks the stop tokens of rows that are shorter than their min_tokens ask for."""
    early = lengths < sampling.min_len
    rows = jnp.arange(logits.shape[0])[:, None]
    columns = jnp.where(early[:, None], sampling.stop_ids, logits.shape[1])
    return logits.at[rows, columns].set(MASKED, mode="drop")
