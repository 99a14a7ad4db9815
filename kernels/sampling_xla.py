"""The operations of `sampling` in plain JAX, for any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jaxllm.kernels.choice import Choice
from jaxllm.kernels.gumbel import gumbel
from jaxllm.kernels.ordered_bits import order_bits, unorder_bits


def summarize(logits, inverse_temperature):
    """See `sampling.summarize`."""
    del inverse_temperature  # masses at the temperature are summed where top_p asks for them
    logits = logits.astype(jnp.float32)
    peak = logits.max(axis=-1)
    return peak, jnp.argmax(logits, axis=-1).astype(jnp.int32), jax.nn.logsumexp(logits, axis=-1), ()


def find_threshold(logits, peak, parts, inverse_temperature, choice: Choice):
    """See `sampling.find_threshold`."""
    del parts
    logits = logits.astype(jnp.float32)
    return jax.lax.cond(
        jnp.any((choice.top_k > 0) | (choice.top_p < 1)),
        lambda: _find_threshold(logits, _scale(logits, peak, inverse_temperature), choice),
        lambda: choice.least,
    )


def draw(logits, peak, inverse_temperature, threshold, keys, positions):
    """See `sampling.draw`."""
    logits = logits.astype(jnp.float32)
    noise = gumbel(keys, positions, logits.shape[1])
    perturbed = _scale(logits, peak, inverse_temperature) + noise
    kept = jnp.where(logits >= threshold[:, None], perturbed, -jnp.inf)
    return jnp.argmax(kept, axis=-1).astype(jnp.int32)


def top_tokens(logits, parts, count):
    """See `sampling.top_tokens`."""
    del parts
    return tuple(jax.lax.top_k(logits.astype(jnp.float32), count))


def _scale(logits, peak, inverse_temperature):
    """Relative to the largest, so that a tiny temperature cannot overflow it."""
    return (logits - peak[:, None]) * inverse_temperature[:, None]


def _find_threshold(logits, scaled, choice: Choice):
    vocab = logits.shape[1]
    wanted = jnp.where(choice.top_k > 0, choice.top_k, vocab).astype(jnp.float32)
    lowest = largest_with_mass(logits, jnp.ones_like(logits), wanted)
    lowest = jnp.maximum(jnp.where(choice.top_k > 0, lowest, -jnp.inf), choice.least)
    weights = jnp.where(logits >= lowest[:, None], jnp.exp(scaled), 0)
    # If rounding puts the target out of reach, the search ends at the smallest value.
    nucleus = largest_with_mass(logits, weights, choice.top_p * weights.sum(axis=-1))
    return jnp.where(choice.top_p < 1, jnp.maximum(lowest, nucleus), lowest)


def largest_with_mass(
    values: Float[Array, "rows vocab"], weights: Float[Array, "rows vocab"], target: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """The largest t such that the weights of values >= t add up to at least `target`; the smallest value if none is.

    Bisects the 32 bits of the float: exact, and without a sort.
    """
    order = order_bits(values)

    def narrow(bit: Array, found: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        candidate = found | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        mass = jnp.sum(jnp.where(order >= candidate[:, None], weights, 0), axis=-1)
        return jnp.where(mass >= target, candidate, found)

    bits = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(values.shape[0], jnp.uint32))
    return unorder_bits(jnp.maximum(bits, order.min(axis=-1)))
