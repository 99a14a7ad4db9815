"""From logits to one token a row. Everything is per row, so a row's token never depends on its neighbours.

A step in which no row asks for more than the most likely token pays for no more: a branch, taken on the
device, decides. Its branches return token ids, never logits, which are too large to pass through.
Random numbers come from a key per request and the position of the token: the batch, its order and
preemption change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.kernels.backend import Backend
from jaxllm.kernels.sampling import Summary, draw, find_threshold, summarize
from jaxllm.runner.device_state import Asks, History, SamplingState, Tables
from jaxllm.runner.logit_changes import LogitsProcessor, Rows, change_logits
from jaxllm.runner.token_details import Details, describe_tokens, no_details


class Sample(NamedTuple):
    """What a step sampled."""

    token_ids: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    """Log-probability of the token under the model's raw distribution, before any parameter applied."""
    details: Details
    """Of every row if a row asks for log-probabilities, else of no meaning."""


def sample(
    logits: Float[Array, "rows vocab"],
    rows: Rows,
    history: History,
    tables: Tables,
    *,
    backend: Backend = "xla",
    processors: Sequence[LogitsProcessor] = (),
) -> Sample:
    """Chooses the token at position `rows.lengths` of each row.

    Args:
        logits: raw, in any type; what is computed is float32.
        rows: how they are sampled.
        history: by seat; read where a row may need it.
        tables: likewise.
        backend: who computes; "xla" on any device, "pallas" on GPUs.
        processors: functions that every row's logits go through.
    """
    sampling = rows.sampling
    summary = summarize(logits, _inverse_temperature(sampling), backend=backend)
    draws = jnp.any(sampling.temperature != 0)
    asks_more = jnp.any((sampling.asks != 0) | (rows.lengths < sampling.min_len)) | bool(processors)
    nothing = no_details(len(logits))

    def choose_among_changed() -> tuple[Int[Array, " rows"], Details]:
        changed = change_logits(logits, rows, history, tables, processors)
        changed_summary = summarize(changed, _inverse_temperature(sampling), backend=backend)
        chosen = _choose(changed, changed_summary, rows, backend)
        # Where nothing is left to choose from, changes are of no use.
        chosen = jnp.where(changed_summary.peak > -jnp.inf, chosen, summary.most_likely)
        return chosen, jax.lax.cond(
            jnp.any(rows.ask(Asks.LOGPROBS)),
            lambda: describe_tokens(logits, summary, chosen, backend=backend),
            lambda: nothing,
        )

    token_ids, details = jax.lax.switch(
        jnp.where(asks_more, 2, draws.astype(jnp.int32)),
        (
            lambda: (summary.most_likely, nothing),
            lambda: (_choose(logits, summary, rows, backend), nothing),
            choose_among_changed,
        ),
    )
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    return Sample(token_ids, chosen.astype(jnp.float32) - summary.log_total, details)


def _choose(logits: Array, summary: Summary, rows: Rows, backend: Backend) -> Int[Array, " rows"]:
    """A sample of what min_p, top_k and top_p keep; greedy rows, which filter nothing, take the most likely."""
    sampling = rows.sampling
    greedy = sampling.temperature == 0
    scale = _inverse_temperature(sampling)
    top_k, top_p = jnp.where(greedy, 0, sampling.top_k), jnp.where(greedy, 1.0, sampling.top_p)
    min_p = jnp.where(greedy, 0.0, sampling.min_p)
    threshold = find_threshold(logits, summary, scale, top_k, top_p, min_p, backend=backend)
    threshold = jnp.where(greedy, jnp.inf, threshold)
    drawn = draw(logits, summary.peak, scale, threshold, sampling.key, rows.lengths, backend=backend)
    return jnp.where(greedy, summary.most_likely, drawn)


def _inverse_temperature(sampling: SamplingState) -> Float[Array, " rows"]:
    return 1 / jnp.where(sampling.temperature == 0, 1.0, sampling.temperature)
