"""The noise of Gumbel-max sampling: the argmax of logits plus this noise is a sample (arXiv:1611.01144).

Invariant: a token's noise depends on its request's key, the position drawn for and the token's id alone, so a
sample does not depend on the batch; whoever computes it, in whatever tiles, uses the functions here.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

GROUP = 128
"""Tokens that share `HALF` calls of the generator: tokens i and i + HALF of a group get the two words of one call."""
HALF = GROUP // 2

PARITY = np.uint32(0x1BD11BDA)
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
LARGEST_UNIFORM = np.float32(1 - 2**-24)
"""So that no token's noise is -inf."""


def gumbel(keys: UInt32[Array, "rows 2"], positions: Int[Array, " rows"], size: int) -> Float[Array, "rows size"]:
    """Noise of tokens 0 to `size` - 1 at each row's position."""
    counters = jnp.arange(-(-size // GROUP) * HALF, dtype=jnp.uint32)
    pair = gumbel_pair(keys[:, :1], keys[:, 1:], positions[:, None], counters[None, :])
    grouped = [noise.reshape(len(keys), -1, HALF) for noise in pair]
    return jnp.concatenate(grouped, axis=2).reshape(len(keys), -1)[:, :size]


def gumbel_pair(key0, key1, position, counter) -> tuple[Array, Array]:
    """Noise of token `counter % HALF` of group `counter // HALF`, and of the token `HALF` behind it.

    Args:
        key0: uint32, as `key1`; all four broadcast.
        position: int32 or uint32.
        counter: uint32.
    """
    first, second = _threefry(key0, key1, position.astype(jnp.uint32), counter)
    return _to_gumbel(first), _to_gumbel(second)


def _threefry(key0, key1, count0, count1) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011)."""
    keys = (key0, key1, key0 ^ key1 ^ PARITY)
    x0, x1 = count0 + key0, count1 + key1
    for turn in range(5):
        for distance in ROTATIONS[turn % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance)))
        x0 = x0 + keys[(turn + 1) % 3]
        x1 = x1 + (keys[(turn + 2) % 3] + np.uint32(turn + 1))
    return x0, x1


def _to_gumbel(bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Of an exponential variable with the full resolution of float32 near 0, where the largest noise comes from."""
    uniform = jnp.minimum(bits.astype(jnp.float32) * np.float32(2**-32) + np.float32(2**-33), LARGEST_UNIFORM)
    return -jnp.log(-jnp.log1p(-uniform))
