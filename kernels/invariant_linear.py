"""The linear map of a projection with one order of sums, for NVIDIA GPUs (Pallas, Triton lowering).

Invariant: an output depends on its own token and its own row of the weight, bit for bit: not on how many tokens there
are, nor on the tile it is in. Every program goes through all inputs in order; matrix units add them up in groups of
16, the same in tiles of every size and with either operand first (measured on an H200, 1 to 8192 tokens). Cutting
the inputs into parts that are summed up side by side, as libraries do for few tokens, would end this.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

WIDE = 8448
"""Outputs that give every multiprocessor of an H200 a tile of 64 of them."""
TILES_ABREAST = 16
"""Tiles of tokens that are worked on together, so that the weight is read from memory once for all of them."""


class Tile(NamedTuple):
    """What a program computes, and how."""

    tokens: int
    outputs: int
    inputs: int
    """Taken at once."""
    num_warps: int
    num_stages: int
    weight_first: bool = False
    """The weight is the left operand: the matrix units' left operand has 64 rows or more, and tokens may be fewer."""


def choose_tile(num_tokens: int, num_outputs: int) -> Tile:
    """The fastest of those that were tried on an H200, with the sizes of models of 0.6 to 8 billion parameters."""
    if num_tokens <= 16:
        return Tile(16, 64, 128, 4, 5, True) if num_outputs >= WIDE else Tile(16, 32, 256, 4, 6, True)
    if num_tokens <= 64:
        return Tile(64, 128, 64, 8, 5) if num_outputs >= WIDE else Tile(64, 32, 128, 4, 5)
    if num_tokens <= 512:
        return Tile(128, 256, 64, 8, 3) if num_outputs >= WIDE else Tile(128, 64, 128, 4, 3, True)
    return Tile(128, 256, 64, 8, 4)


def invariant_linear(
    x: Float[Array, "tokens *inputs"],
    weight: Float[Array, "*outputs_inputs"],
    *,
    num_inputs: int,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens *outputs"]:
    """Contracts the last `num_inputs` axes of x with those of the weight; float32 sums, rounded once to x's dtype.

    Args:
        x: bfloat16 or float16.
        weight: output axes, then input axes, of the same dtype; all on one device.
        tile: by default what `choose_tile` says. It changes no bit.
    """
    split = weight.ndim - num_inputs
    outputs, size = weight.shape[:split], prod(weight.shape[split:])
    x, weight = x.reshape(x.shape[0], size), weight.reshape(-1, size)
    tile = tile or choose_tile(x.shape[0], weight.shape[0])
    y = pl.pallas_call(
        partial(_kernel, tile=tile),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype),
        grid=(pl.cdiv(x.shape[0], tile.tokens) * pl.cdiv(weight.shape[0], tile.outputs),),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="invariant_linear",
    )(x, weight)
    return y.reshape(-1, *outputs)


def _kernel(x_ref, weight_ref, out, *, tile: Tile):
    (num_tokens, num_inputs), num_outputs = x_ref.shape, weight_ref.shape[0]
    row, column = _place(pl.cdiv(num_tokens, tile.tokens), pl.cdiv(num_outputs, tile.outputs))
    tokens = row * tile.tokens + jnp.arange(tile.tokens)
    outputs = column * tile.outputs + jnp.arange(tile.outputs)
    is_token = None if num_tokens % tile.tokens == 0 else (tokens < num_tokens)[:, None]
    is_output = None if num_outputs % tile.outputs == 0 else (outputs < num_outputs)[:, None]

    def add(step, sums):
        inputs = step * tile.inputs + jnp.arange(tile.inputs)
        is_input = None if num_inputs % tile.inputs == 0 else (inputs < num_inputs)[None, :]
        x = _load(x_ref, tokens, inputs, _both(is_token, is_input))
        weight = _load(weight_ref, outputs, inputs, _both(is_output, is_input))
        return sums + (plt.dot(weight, x.T) if tile.weight_first else plt.dot(x, weight.T))

    shape = (tile.outputs, tile.tokens) if tile.weight_first else (tile.tokens, tile.outputs)
    sums = jax.lax.fori_loop(0, pl.cdiv(num_inputs, tile.inputs), add, jnp.zeros(shape))
    y = sums.T if tile.weight_first else sums
    mask = _both(is_token, None if is_output is None else is_output.T)
    mask = None if mask is None else jnp.broadcast_to(mask, y.shape)
    plt.store(out.at[tokens[:, None], outputs[None, :]], y.astype(out.dtype), mask=mask)


def _place(rows: int, columns: int):
    """Row and column of this program's tile: down a few rows, then on to the next column."""
    program, abreast = pl.program_id(0), TILES_ABREAST * columns
    first = program // abreast * TILES_ABREAST
    height = jnp.minimum(rows - first, TILES_ABREAST)
    return first + program % abreast % height, program % abreast // height


def _both(one, other):
    """Whichever masks there are."""
    return other if one is None else one if other is None else one & other


def _load(ref, rows, columns, mask):
    at = ref.at[rows[:, None], columns[None, :]]
    if mask is None:
        return plt.load(at)
    return plt.load(at, mask=jnp.broadcast_to(mask, (rows.size, columns.size)), other=0)
