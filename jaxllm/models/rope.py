"""Angles of the rotary position embedding (arXiv:2104.09864), with its scalings for longer contexts."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Float32 [rotary_dim / 2]: radians per position of each rotated pair."""
    dim = rope.rotary_dim or head_dim
    frequencies = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.scaling != "none":
        kept = _kept_share(frequencies, rope)
        frequencies = kept * frequencies + (1 - kept) * frequencies / rope.factor
    if rope.freq_factors:
        frequencies = frequencies / np.asarray(rope.freq_factors)
    return frequencies.astype(np.float32)


def _kept_share(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """How much of each frequency is not scaled: 1 for high ones, 0 for low ones, a ramp in between."""
    if rope.scaling == "linear":
        return np.zeros_like(frequencies)
    if rope.scaling == "llama3":  # a ramp over the number of turns
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return np.clip(share, 0.0, 1.0)
    assert rope.scaling == "yarn", rope.scaling  # arXiv:2309.00071, a ramp over the dimensions
    first, last = (_yarn_pair(turns, len(frequencies), rope) for turns in (rope.high_freq_factor, rope.low_freq_factor))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    width = last - first or 0.001
    return 1.0 - np.clip((np.arange(len(frequencies)) - first) / width, 0.0, 1.0)


def _yarn_pair(turns: float, num_pairs: int, rope: RopeConfig) -> float:
    """The pair, as a fraction of one too, that turns this often in the original context."""
    return num_pairs * math.log(rope.original_max_position / (turns * 2 * math.pi)) / math.log(rope.theta)


def rope_tables(
    positions: Int[Array, " tokens"], frequencies: np.ndarray, attention_factor: float = 1.0
) -> tuple[Float[Array, "tokens half_dim"], Float[Array, "tokens half_dim"]]:
    """Float32 cosines and sines of every token's angles; computed once a step, used by every layer."""
    angles = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if attention_factor == 1.0 else (cos * attention_factor, sin * attention_factor)
