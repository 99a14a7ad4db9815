"""From logits to one token a row. Everything is per row, so a row's token never depends on its neighbours.

A step in which no row asks for more than the most likely token pays for no more: one branch, taken on
the device, decides. Its branches return token ids, never logits, which are too large to pass through.
Random numbers come from a key per request folded with the position of the token: the batch, its order
and preemption change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

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
    seen: Callable[[], Bool[Array, "rows vocab"]],
    lengths: Int[Array, " rows"],
    *,
    unroll: bool = False,
) -> Sample:
    """Chooses the token at position `lengths` of each row, from its raw float32 logits.

    Args:
        sampling: the rows' parameters.
        seen: tokens of each row's prompt and answer; called where a row may need it.
        lengths: tokens of each row so far.
        unroll: no loops, which on a GPU would make the host wait for the device: they cannot be in a CUDA graph.
    """
    plain = (sampling.temperature == 0) & (sampling.repetition_penalty == 1.0) & (lengths >= sampling.min_len)
    token_ids = jax.lax.cond(
        jnp.all(plain),
        lambda: _most_likely(logits),
        lambda: _choose(logits, sampling, seen(), lengths, unroll),
    )
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]
    return Sample(token_ids, chosen - jax.nn.logsumexp(logits, axis=-1))


def _choose(logits: Array, sampling: SamplingState, seen: Array, lengths: Array, unroll: bool) -> Int[Array, " rows"]:
    """Gumbel-max: the argmax of perturbed logits is a sample; greedy rows take the unperturbed argmax."""
    adjusted = _suppress_stops(_penalize(logits, sampling.repetition_penalty, seen), sampling, lengths)
    greedy = sampling.temperature == 0
    # Relative to the largest, so that a tiny temperature cannot overflow it.
    relative = adjusted - adjusted.max(axis=-1, keepdims=True)
    scaled = relative / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    threshold = jax.lax.cond(
        jnp.any(((sampling.top_k > 0) | (sampling.top_p < 1)) & ~greedy),
        lambda: _threshold(scaled, sampling, unroll),
        lambda: jnp.full(scaled.shape[0], MASKED),
    )
    kept = jnp.where(scaled >= threshold[:, None], scaled, MASKED)
    noise = _gumbel(sampling.key, lengths, logits.shape[1])
    return jnp.where(greedy, _most_likely(adjusted), _most_likely(kept + noise))


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


def _most_likely(logits: Array) -> Int[Array, " rows"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _gumbel(keys: UInt32[Array, "rows 2"], positions: Array, size: int) -> Float[Array, "rows vocab"]:
    def row(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.gumbel(folded, (size,))

    return jax.vmap(row)(keys, positions)


def _threshold(logits: Array, sampling: SamplingState, unroll: bool = False) -> Float[Array, " rows"]:
    """The smallest logit that top_k, and then top_p among what top_k keeps, let pass; ties pass together."""
    vocab = logits.shape[1]
    wanted = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab).astype(jnp.float32)
    lowest = _largest_with_mass(logits, jnp.ones_like(logits), wanted, unroll)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = jnp.where(logits >= lowest[:, None], weights, 0)
    # If rounding puts the target out of reach, the search ends at the smallest value.
    nucleus = _largest_with_mass(logits, weights, sampling.top_p * weights.sum(axis=-1), unroll)
    return jnp.where(sampling.top_p < 1, jnp.maximum(lowest, nucleus), lowest)


def _largest_with_mass(
    values: Array, weights: Array, target: Float[Array, " rows"], unroll: bool = False
) -> Float[Array, " rows"]:
    """The largest t such that the weights of values >= t add up to at least `target`; the smallest value if none is.

    Bisects the 32 bits of the float, which order like integers once negative ones are flipped: exact,
    and without a sort.
    """
    order = _order_bits(values)

    def narrow(bit: Array, found: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        candidate = found | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        mass = jnp.sum(jnp.where(order >= candidate[:, None], weights, 0), axis=-1)
        return jnp.where(mass >= target, candidate, found)

    bits = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(values.shape[0], jnp.uint32), unroll=unroll)
    return _unorder_bits(jnp.maximum(bits, order.min(axis=-1)))


SIGN = np.uint32(0x80000000)


def _order_bits(values: Float[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def _unorder_bits(order: UInt32[Array, " rows"]) -> Float[Array, " rows"]:
    bits = jnp.where(order >= SIGN, order ^ SIGN, ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
