"""The linear map of every projection, with the weight stored as [outputs, inputs].

Invariant: the forms below are the same product; which one is faster depends on the device and the sizes.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

WEIGHT_FIRST_TOKENS = 64
TILE, WANTED_TILES, MAX_SPLITS, MIN_SPLIT = 64, 512, 8, 128


def linear(
    x: Float[Array, "tokens *inputs"],
    weight: Float[Array, "*outputs_inputs"],
    *,
    num_inputs: int,
    platform: str,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "tokens *outputs"]:
    """Contracts the last `num_inputs` axes of x with those of the weight.

    Args:
        weight: output axes, then input axes. In either group only the first axis may be sharded.
        platform: of the device it runs on. XLA's CPU compiler multiplies few tokens by a large weight
            two to three times faster with the weight on the left, if it is kept from swapping the operands
            (30 layers of a 135M model at 16 tokens: 57 ms against 133 ms, on 2 cores).
        dtype: of the result; by default x's.
    """
    split = weight.ndim - num_inputs
    outputs, size = weight.shape[:split], prod(weight.shape[split:])
    # Two dimensions each, or the CPU compiler copies the whole weight into another layout at every step.
    x, weight = x.reshape(x.shape[0], size), weight.reshape(-1, size)
    if platform == "cpu" and 1 < x.shape[0] <= WEIGHT_FIRST_TOKENS:
        y = jax.lax.optimization_barrier(_product(weight, x, dtype)).T
    else:
        y = _product(x, weight, dtype)
    return y.reshape(-1, *outputs)


def _product(left: Array, right: Array, dtype: jnp.dtype | None) -> Array:
    return jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def num_splits(num_tokens: int, num_inputs: int, num_outputs: int) -> int:
    """Parts the inputs are cut into so that a GPU has enough to do at once: a power of two, 1 for large products."""
    tiles, splits = -(-num_tokens // TILE) * -(-num_outputs // TILE), 1
    while splits < MAX_SPLITS and 2 * splits * tiles <= WANTED_TILES and num_inputs % (2 * splits * MIN_SPLIT) == 0:
        splits *= 2
    return splits


def partial_products(
    x: Float[Array, "tokens *inputs"], weight: Float[Array, "*outputs_inputs"], *, num_inputs: int
) -> Float[Array, "splits tokens *outputs"]:
    """`linear` in parts over the inputs, whose sum is the product: float32 if there are several, else in x's dtype.

    Whoever reads the parts adds them up in passing, which saves a pass over them.

    Args:
        weight: output axes, then input axes; all on one device.
    """
    split = weight.ndim - num_inputs
    outputs, size, num_tokens = weight.shape[:split], prod(weight.shape[split:]), x.shape[0]
    splits = num_splits(num_tokens, size, prod(outputs))
    x, weight = x.reshape(num_tokens, splits, -1), weight.reshape(-1, splits, size // splits)
    dtype = jnp.float32 if splits > 1 else x.dtype
    parts = jax.lax.dot_general(x, weight, (((2,), (2,)), ((1,), (1,))), preferred_element_type=dtype)
    return parts.reshape(splits, num_tokens, *outputs)


def add_up(parts: Float[Array, "splits *shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """The sum of a product's parts, in order, in this dtype."""
    return parts[0].astype(dtype) if parts.shape[0] == 1 else parts.sum(axis=0).astype(dtype)
