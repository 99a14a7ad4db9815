"""The operations that choose a token from a row of logits: sum it up, find what may be chosen, draw; name the best.

Invariant: a row's results depend on its own logits and parameters alone, to the bit, whatever the other rows
are and however many; and a row that asks for nothing costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.kernels import sampling_pallas as pallas
from jaxllm.kernels import sampling_xla as xla
from jaxllm.kernels.backend import Backend
from jaxllm.kernels.choice import Choice


class Summary(NamedTuple):
    """What all logits of a row amount to."""

    peak: Float[Array, " rows"]
    """The largest logit."""
    most_likely: Int[Array, " rows"]
    """The first token that has it."""
    log_total: Float[Array, " rows"]
    """Logarithm of the sum of the exponentials."""
    parts: Any
    """What the backend keeps for `find_threshold` and `top_tokens`."""


class Implementation(NamedTuple):
    """The operations of a backend."""

    summarize: Callable[..., tuple]
    find_threshold: Callable[..., Array]
    draw: Callable[..., Array]
    top_tokens: Callable[..., tuple]


IMPLEMENTATIONS: dict[Backend, Implementation] = {
    "xla": Implementation(xla.summarize, xla.find_threshold, xla.draw, xla.top_tokens),
    "pallas": Implementation(pallas.summarize, pallas.find_threshold, pallas.draw, pallas.top_tokens),
    "pallas_interpret": Implementation(
        partial(pallas.summarize, interpret=True),
        partial(pallas.find_threshold, interpret=True),
        partial(pallas.draw, interpret=True),
        partial(pallas.top_tokens, interpret=True),
    ),
}


def summarize(
    logits: Float[Array, "rows vocab"], inverse_temperature: Float[Array, " rows"], *, backend: Backend = "xla"
) -> Summary:
    """Sums up logits; -inf is a token that cannot come, and no row may be nothing else.

    Args:
        logits: in any type; what is computed is float32.
        inverse_temperature: finite; what `find_threshold` will be given.
        backend: "xla" runs on any device, "pallas" on GPUs.
    """
    return Summary(*IMPLEMENTATIONS[backend].summarize(logits, inverse_temperature))


def find_threshold(
    logits: Float[Array, "rows vocab"],
    summary: Summary,
    inverse_temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"] | None = None,
    *,
    backend: Backend = "xla",
) -> Float[Array, " rows"]:
    """The smallest logit that min_p, top_k, and then top_p among what these keep, let pass; equal logits pass together.

    Args:
        logits: in any type.
        summary: of these logits.
        inverse_temperature: what logits are multiplied by before their exponentials are top_p's masses.
        top_k: tokens to keep; 0 is all.
        top_p: share of the mass to keep; 1 is all.
        min_p: share of the most likely token's mass that a token has to have; 0 (the default) is none.
        backend: "xla" runs on any device, "pallas" on GPUs.

    Returns:
        -inf where nothing is asked for. The search is exact; masses are float32 sums in a fixed order. Where
        rounding puts top_p's target out of reach, all that the others keep pass.
    """
    implementation = IMPLEMENTATIONS[backend]
    vocab = logits.shape[1]
    least = jnp.full_like(summary.peak, -jnp.inf)
    if min_p is not None:
        # The logarithm of 0 is what it has to be.
        least = summary.peak + jnp.log(min_p) / inverse_temperature
    choice = Choice(jnp.minimum(top_k, vocab), top_p, least)
    return implementation.find_threshold(logits, summary.peak, summary.parts, inverse_temperature, choice)


def draw(
    logits: Float[Array, "rows vocab"],
    peak: Float[Array, " rows"],
    inverse_temperature: Float[Array, " rows"],
    threshold: Float[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    positions: Int[Array, " rows"],
    *,
    backend: Backend = "xla",
) -> Int[Array, " rows"]:
    """A sample of each row's distribution over the tokens whose logits are not below the threshold.

    Args:
        logits: in any type.
        peak: the largest logit of each row.
        inverse_temperature: what logits are multiplied by; finite.
        threshold: +inf for rows that need no sample; what they get is of no meaning.
        keys: of the random numbers, with `positions`: see `gumbel`.
        positions: a request's token is at the same position in every batch.
        backend: "xla" runs on any device, "pallas" on GPUs.
    """
    implementation = IMPLEMENTATIONS[backend]
    return implementation.draw(logits, peak, inverse_temperature, threshold, keys, positions)


def top_tokens(
    logits: Float[Array, "rows vocab"], summary: Summary, count: int, *, backend: Backend = "xla"
) -> tuple[Float[Array, "rows count"], Int[Array, "rows count"]]:
    """The largest logits of each row as float32, in order, and their tokens; of equals the first token comes first.

    Args:
        logits: in any type.
        summary: of these logits.
        count: at most the vocabulary's size.
        backend: "xla" runs on any device, "pallas" on GPUs.
    """
    return IMPLEMENTATIONS[backend].top_tokens(logits, summary.parts, count)
