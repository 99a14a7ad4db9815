"""The linear map of every projection, with the weight stored as [outputs, inputs].

Invariant: the two forms below are the same product; which one is faster depends on the device.
"""

from __future__ import annotations

from math import prod

import jax
from jaxtyping import Array, Float

WEIGHT_FIRST_TOKENS = 64


def linear(
    x: Float[Array, "tokens *inputs"], weight: Float[Array, "*outputs_inputs"], *, num_inputs: int, platform: str
) -> Float[Array, "tokens *outputs"]:
    """Contracts the last `num_inputs` axes of x with those of the weight; result in x's dtype.

    Args:
        weight: output axes, then input axes. In either group only the first axis may be sharded.
        platform: of the device it runs on. XLA's CPU compiler multiplies few tokens by a large weight
            two to three times faster with the weight on the left, if it is kept from swapping the operands
            (30 layers of a 135M model at 16 tokens: 57 ms against 133 ms, on 2 cores).
    """
    split = weight.ndim - num_inputs
    outputs, size = weight.shape[:split], prod(weight.shape[split:])
    # Two dimensions each, or the CPU compiler copies the whole weight into another layout at every step.
    x, weight = x.reshape(x.shape[0], size), weight.reshape(-1, size)
    if platform == "cpu" and 1 < x.shape[0] <= WEIGHT_FIRST_TOKENS:
        y = jax.lax.optimization_barrier(jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())))).T
    else:
        y = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())))
    return y.reshape(-1, *outputs)
