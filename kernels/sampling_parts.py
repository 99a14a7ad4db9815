"""What the sampling kernels for GPUs share: how they are launched, how they load, what one keeps for the next."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

traced_once = partial(jax.jit, static_argnames="interpret")
"""The branches of a step share what is traced and lowered: each is a second's work of the host."""


class Launch(NamedTuple):
    """How a kernel is run; found by tuning."""

    chunk: int
    """Groups of a program; of no meaning where a program owns a row."""
    tile: int
    """Groups that are taken at once."""
    num_warps: int

    @property
    def params(self) -> plt.CompilerParams:
        return plt.CompilerParams(num_warps=self.num_warps, num_stages=1)


class Parts(NamedTuple):
    """What the first pass over the logits keeps."""

    maxima: Float[Array, "rows groups"]
    """The largest logit of each group."""
    mass: Float[Array, " rows"]
    """Sum of the exponentials at the temperature, relative to the peak."""


def load_logits(logits, row, column, mask) -> Array:
    """Logits as float32, whatever the model computes in."""
    return plt.load(logits.at[row, column], mask=mask, other=-jnp.inf).astype(jnp.float32)
