"""The linear map of a projection with one order of sums, for NVIDIA GPUs (Pallas, Triton lowering).

Invariant: an output depends on its own token and its own row of the weight, bit for bit: not on how many tokens there
are, nor on the tile it is in. Every program goes through all inputs in order; matrix units add them up in groups of
16, the same in tiles of every size and with either operand first (measured on an H200, 1 to 8192 tokens). Libraries
cut the inputs into parts that are summed up side by side, more of them for fewer tokens, which ends this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

LONG_SUM, PART_MULTIPLE = 8192, 256
"""Inputs from which on a product is in two parts, and what a part is a multiple of: whole steps of every tile."""
MANY = 1 << 30
LEAST_TILES = 90
"""Of a product, where there are tiles small enough; an H200 has 132 multiprocessors."""
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


TILES: Mapping[int, Sequence[Tile]] = {
    16: (Tile(16, 64, 128, 4, 5, True), Tile(16, 32, 256, 4, 6, True)),
    64: (Tile(64, 128, 64, 8, 5), Tile(64, 64, 128, 4, 4), Tile(64, 32, 128, 4, 5)),
    MANY: (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 4), Tile(128, 64, 128, 4, 3, True), Tile(64, 64, 128, 4, 4)),
}
"""Of steps of so many tokens at the most, the largest first: the fastest of those that were tried on an H200, with the
sizes of models of 0.6 and 8 billion parameters."""


def choose_tile(num_tokens: int, num_outputs: int, num_parts: int = 1) -> Tile:
    """The largest that gives most multiprocessors something to do, or the smallest."""
    tiles = TILES[min(most for most in TILES if most >= num_tokens)]
    for tile in tiles:
        if num_parts * pl.cdiv(num_tokens, tile.tokens) * pl.cdiv(num_outputs, tile.outputs) >= LEAST_TILES:
            return tile
    return tiles[-1]


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
    return _multiply(x, weight, num_inputs, num_parts=1, tile=tile, interpret=interpret)[0]


def invariant_parts(
    x: Float[Array, "tokens *inputs"], weight: Float[Array, "*outputs_inputs"], *, num_inputs: int, interpret: bool
) -> Float[Array, "parts tokens *outputs"]:
    """The product of a long sum in two parts, float32, that give few tokens more programs; else whole, in x's dtype.

    How many parts there are depends on the weight alone. Whoever reads them adds them up in order.
    """
    size = prod(weight.shape[weight.ndim - num_inputs :])
    num_parts = 2 if size >= LONG_SUM and size % (2 * PART_MULTIPLE) == 0 else 1
    return _multiply(x, weight, num_inputs, num_parts=num_parts, tile=None, interpret=interpret)


def _multiply(x, weight, num_inputs: int, *, num_parts: int, tile: Tile | None, interpret: bool):
    split = weight.ndim - num_inputs
    outputs, size, num_tokens = weight.shape[:split], prod(weight.shape[split:]), x.shape[0]
    x, weight = x.reshape(num_tokens, size), weight.reshape(-1, size)
    num_outputs = weight.shape[0]
    tile = tile or choose_tile(num_tokens, num_outputs, num_parts)
    parts = pl.pallas_call(
        partial(_kernel, tile=tile),
        out_shape=jax.ShapeDtypeStruct((num_parts, num_tokens, num_outputs), jnp.float32 if num_parts > 1 else x.dtype),
        grid=(pl.cdiv(num_tokens, tile.tokens) * pl.cdiv(num_outputs, tile.outputs), num_parts),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="invariant_linear",
    )(x, weight)
    return parts.reshape(num_parts, num_tokens, *outputs)


def _kernel(x_ref, weight_ref, out, *, tile: Tile):
    num_parts, num_tokens, num_outputs = out.shape
    size, part = x_ref.shape[1] // num_parts, pl.program_id(1)
    row, column = _place(pl.cdiv(num_tokens, tile.tokens), pl.cdiv(num_outputs, tile.outputs))
    tokens = row * tile.tokens + jnp.arange(tile.tokens)
    outputs = column * tile.outputs + jnp.arange(tile.outputs)
    is_token = None if num_tokens % tile.tokens == 0 else (tokens < num_tokens)[:, None]
    is_output = None if num_outputs % tile.outputs == 0 else (outputs < num_outputs)[:, None]

    def add(step, sums):
        inputs = step * tile.inputs + jnp.arange(tile.inputs)
        is_input = None if size % tile.inputs == 0 else (inputs < size)[None, :]
        x = _load(x_ref, tokens, part * size + inputs, _both(is_token, is_input))
        weight = _load(weight_ref, outputs, part * size + inputs, _both(is_output, is_input))
        return sums + (plt.dot(weight, x.T) if tile.weight_first else plt.dot(x, weight.T))

    shape = (tile.outputs, tile.tokens) if tile.weight_first else (tile.tokens, tile.outputs)
    sums = jax.lax.fori_loop(0, pl.cdiv(size, tile.inputs), add, jnp.zeros(shape))
    y = sums.T if tile.weight_first else sums
    mask = _both(is_token, None if is_output is None else is_output.T)
    mask = None if mask is None else jnp.broadcast_to(mask, y.shape)
    plt.store(out.at[part, tokens[:, None], outputs[None, :]], y.astype(out.dtype), mask=mask)


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
