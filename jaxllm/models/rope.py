"""Rotary position embedding (arXiv:2104.09864), with Llama 3.1's scaling of low frequencies.

Rotated pairs are dimension i and i + head_dim / 2, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Float32 [head_dim / 2]: radians per position of each rotated pair."""
    frequencies = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "llama3":
        frequencies = _scale_low_frequencies(frequencies, rope)
    if rope.freq_factors:
        frequencies = frequencies / np.asarray(rope.freq_factors)
    return frequencies.astype(np.float32)


def _scale_low_frequencies(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Wavelengths longer than the original context are stretched by `factor`, those in between partly."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)
    return (1 - share) * frequencies / rope.factor + share * frequencies


def rope_tables(
    positions: Int[Array, " tokens"], frequencies: np.ndarray
) -> tuple[Float[Array, "tokens half_dim"], Float[Array, "tokens half_dim"]]:
    """Float32 cosines and sines of every token's angles; computed once a step, used by every layer."""
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "tokens *heads head_dim"],
    cos: Float[Array, "tokens half_dim"],
    sin: Float[Array, "tokens half_dim"],
) -> Float[Array, "tokens *heads head_dim"]:
    """Rotates every head's vector by its token's angles; float32 inside, x's dtype out."""
    middle = (1,) * (x.ndim - 2)
    cos, sin = (table.reshape(table.shape[0], *middle, -1) for table in (cos, sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
