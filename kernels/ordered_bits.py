"""Floats as unsigned integers of the same order, which a search can bisect exactly.

Invariant: for finite and infinite x and y, x < y exactly if order_bits(x) < order_bits(y), but that -0 is below 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

SIGN = np.uint32(0x80000000)
LOWEST = np.uint32(0x007FFFFF)
"""The bits of -inf: no number has smaller ones."""


def order_bits(values: Float[Array, "..."]) -> UInt32[Array, "..."]:
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def unorder_bits(order: UInt32[Array, "..."]) -> Float[Array, "..."]:
    bits = jnp.where(order >= SIGN, order ^ SIGN, ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
