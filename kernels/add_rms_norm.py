"""A residual sum and the root-mean-square norm (arXiv:1910.07467) of it, in one pass.

Invariant: a token's result depends on its own numbers alone, and sums are float32 in a fixed order.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jaxllm.kernels.backend import Backend
from jaxllm.kernels.linear import add_up

ELEMENTS_PER_WARP = 512


def add_rms_norm(
    x: Float[Array, "tokens hidden"],
    added: Float[Array, "splits tokens hidden"] | None,
    scale: Float[Array, " hidden"],
    *,
    eps: float,
    backend: Backend = "xla",
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    """Returns the sum of x and what is added, and its norm times `scale`; both in x's dtype, the norm of the rounded sum.

    Args:
        x: the residual stream.
        added: what the last layer adds to it, as parts of a sum; None if nothing.
        scale: float32.
        eps: added to the mean square.
        backend: "xla" runs on any device, "pallas" on GPUs.
    """
    if backend == "xla":
        x = x if added is None else x + add_up(added, x.dtype)
        return x, _norm(x.astype(jnp.float32), scale, eps).astype(x.dtype)
    return _add_rms_norm(x, added, scale, eps, interpret=backend == "pallas_interpret")


def _norm(wide, scale, eps: float):
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps) * scale


def _add_rms_norm(x, added, scale, eps: float, *, interpret: bool):
    num_tokens, hidden = x.shape
    columns = pl.next_power_of_2(hidden)
    num_warps = max(1, min(16, columns // ELEMENTS_PER_WARP))
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    arguments = (x, scale) if added is None else (x, scale, added)
    outputs = pl.pallas_call(
        partial(_kernel, hidden=hidden, columns=columns, eps=eps, adds=added is not None),
        out_shape=[like_x] if added is None else [like_x, like_x],
        grid=(num_tokens,),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(*arguments)
    return (x, *outputs) if added is None else (outputs[1], outputs[0])


def _kernel(x, scale, *refs, hidden: int, columns: int, eps: float, adds: bool):
    token, column = pl.program_id(0), jnp.arange(columns)
    mask = column < hidden if columns > hidden else None

    def load(ref):
        return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0)

    wide, by = load(x.at[token, column]).astype(jnp.float32), load(scale.at[column])  # before the wait for the sum
    *added, normed = refs[: 2 if adds else 1]
    for parts in added:
        wide += sum(load(parts.at[part, token, column]).astype(jnp.float32) for part in range(parts.shape[0]))
        total = wide.astype(x.dtype)
        plt.store(refs[2].at[token, column], total, mask=mask)
        wide = total.astype(jnp.float32)
    mean = jnp.sum(wide * wide) / hidden  # what is masked is 0
    result = wide * jax.lax.rsqrt(mean + eps) * by
    plt.store(normed.at[token, column], result.astype(normed.dtype), mask=mask)
