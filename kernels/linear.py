"""The linear map of every projection, with the weight stored as [outputs, inputs].

Invariant: the two forms below are the same product; which one is faster depends on the device.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

WEIGHT_FIRST_TOKENS = 64


def linear(
    x: Float[Array, "tokens *inputs"], weight: Float[Array, "*outputs_inputs"], *, num_inputs: int, platform: str
) -> Float[Array, "tokens *outputs"]:
    """Contracts the last `num_inputs` axes of x with those of the weight; result in x's dtype.

    Args:
        weight: output axes, then input axes.
        platform: of the device it runs on. XLA's CPU compiler multiplies few tokens by a large weight
            two to three times faster with the weight on the left, if it is kept from swapping the operands
            (30 layers of a 135M model at 16 tokens: 57 ms against 133 ms, on 2 cores).
    """
    split = weight.ndim - num_inputs
    weight_axes, x_axes = tuple(range(split, weight.ndim)), tuple(range(1, x.ndim))
    assert x.ndim == 1 + num_inputs, f"x {x.shape} does not end in the inputs of weight {weight.shape}"
    if platform == "cpu" and 1 < x.shape[0] <= WEIGHT_FIRST_TOKENS and prod(weight.shape[:split]) > 1:
        product = jax.lax.dot_general(weight, x, ((weight_axes, x_axes), ((), ())))
        return jnp.moveaxis(jax.lax.optimization_barrier(product), -1, 0)
    return jax.lax.dot_general(x, weight, ((x_axes, weight_axes), ((), ())))
