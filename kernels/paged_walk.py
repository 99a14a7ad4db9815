"""The inner loop of paged attention on NVIDIA GPUs (Pallas, Triton lowering), shared by its kernels.

A tile of queries of one row and one K/V head walks over a part of the row's context, tile by tile, with
an online softmax (FlashAttention, arXiv:2205.14135). Invariant: the result of a walk depends on the
queries, the part of the context and the size of the context's tiles, never on who else walks.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from jaxllm.kernels.launches import Launch

NEGATIVE = -1e30
"""The peak before any score: finite, so that exp(-inf - NEGATIVE) is 0 and not NaN."""
LOG2E = 1.4426950408889634
SUM_COLUMNS = 16
"""As few as a matrix product has."""


class Shape(NamedTuple):
    """The static sizes a kernel is made for."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int

    @property
    def columns(self) -> int:
        return pl.next_power_of_2(self.head_dim)


class Options(NamedTuple):
    """Keyword arguments of `attend`."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Array | None
    k_scale: float
    v_scale: float


class Call(NamedTuple):
    """What is static about a call of a kernel."""

    shape: Shape
    options: Options
    launch: Launch
    interpret: bool
    invariant: bool = False
    """A token's result has the same bits decoded as in a chunk: all sums in an order that its tile does not change."""


class Running(NamedTuple):
    """The state of the online softmax of the rows of a tile; peaks are in units of log 2."""

    peak: Array
    total: Array
    values: Array


class Context(NamedTuple):
    """Where one row's keys and values of one head lie."""

    tables: Array
    row: Array
    pages_k: Array
    pages_v: Array
    head: Array


def nothing_seen(rows: int, columns: int) -> Running:
    return Running(jnp.full(rows, NEGATIVE), jnp.zeros(rows), jnp.zeros((rows, columns)))


def merge(state: Running, other: Running) -> Running:
    """Both parts of a context; a part that saw nothing changes no bit of the other.

    The part with the higher peak is not scaled. With a factor on both, a compiler could choose which of the two
    products it fuses with the sum, and round the same merge differently in two kernels.
    """
    ours_is_higher = state.peak >= other.peak
    shrink = jnp.exp2(-jnp.abs(state.peak - other.peak))
    higher, lower = (
        jnp.where(ours_is_higher, state.total, other.total),
        jnp.where(ours_is_higher, other.total, state.total),
    )
    rows = ours_is_higher[:, None]
    values, lower_values = jnp.where(rows, state.values, other.values), jnp.where(rows, other.values, state.values)
    total, values = higher + lower * shrink, values + lower_values * shrink[:, None]
    return Running(jnp.maximum(state.peak, other.peak), total, values)


class Sums(NamedTuple):
    """Parts of a context that are complete, folded in order, and the one that grows."""

    closed: Running
    growing: Running

    @staticmethod
    def of_nothing(rows: int, columns: int) -> Sums:
        return Sums(nothing_seen(rows, columns), nothing_seen(rows, columns))

    def closed_if(self, ends) -> Sums:
        """The growing part is complete, if `ends`."""
        both, empty = self.all(), nothing_seen(*self.closed.values.shape)
        choose = partial(jax.tree.map, partial(jnp.where, ends))
        return Sums(choose(both, self.closed), choose(empty, self.growing))

    def all(self) -> Running:
        return merge(self.closed, self.growing)


def sink_weight(logit, peak):
    """A sink's weight beside a total that is relative to `peak`."""
    return jnp.exp2(jnp.minimum(logit.astype(jnp.float32) * LOG2E - peak, 100.0))


def first_seen(position, options: Options, tile: int):
    """Where a walk may begin: a whole tile at or before the first position that `position` sees."""
    return 0 if options.window is None else jnp.maximum(position - options.window + 1, 0) // tile * tile


class Walk(NamedTuple):
    """Attention of q [rows, columns] at `position` [rows] over one row's context."""

    q: Array
    position: Array
    context: Context
    shape: Shape
    options: Options
    tile: int
    """Positions of the context that are taken at once."""
    in_assembly: bool = False
    """Weights are computed by a GPU's own instructions, which cannot be interpreted."""
    sum_by_product: bool = False
    """Weights are added up by the matrix units, which do so in one order whatever the tile; a reduction does not."""

    def in_splits(self, first, last, split: int) -> Running:
        """Positions first to last - 1, of which each query sees what it may; splits are summed up on their own."""

        def step(index, state: Sums) -> Sums:
            begin = first + index * self.tile
            growing = self._tile(state.growing, begin + jnp.arange(self.tile), last)
            return Sums(state.closed, growing).closed_if((begin + self.tile) % split == 0)

        empty = Sums.of_nothing(self.q.shape[0], self.shape.columns)
        return jax.lax.fori_loop(0, pl.cdiv(last - first, self.tile), step, empty).all()

    def over(self, state: Running, first, last) -> Running:
        """Goes on over positions first to last - 1, of which each query sees what it may."""
        return self._tiles(state, first, pl.cdiv(last - first, self.tile), last)

    def over_seen(self, state: Running, first, num_tiles) -> Running:
        """Goes on over whole tiles that every query sees: nothing is masked."""
        return self._tiles(state, first, num_tiles, None)

    def _tiles(self, state: Running, first, num_tiles, last) -> Running:
        def step(index, state: Running) -> Running:
            positions = first + index * self.tile + jnp.arange(self.tile)
            return self._tile(state, positions, last)

        return jax.lax.fori_loop(0, num_tiles, step, state)

    def _tile(self, state: Running, positions, last) -> Running:
        valid = None if last is None else positions < last
        slots = self._slots(positions, valid)
        scores = plt.dot(self.q, self._load(self.context.pages_k, slots, valid), trans_b=True)
        factor = self.options.scale * self.options.k_scale * LOG2E
        if self.options.soft_cap is not None:
            cap = self.options.soft_cap
            scores, factor = jnp.tanh(scores * (factor / LOG2E / cap)), cap * LOG2E
        if valid is not None:
            scores = jnp.where(self._seen(positions, valid), scores, -jnp.inf)
        peak = jnp.maximum(state.peak, scores.max(axis=1) * factor)
        weights = self._weights(scores, factor, peak[:, None])
        shrink = jnp.exp2(state.peak - peak)
        values = self._load(self.context.pages_v, slots, valid)
        narrow = weights.astype(values.dtype)
        total = state.total * shrink + (self._sum(narrow) if self.sum_by_product else weights.sum(axis=1))
        return Running(peak, total, state.values * shrink[:, None] + plt.dot(narrow, values))

    def _sum(self, weights):
        """Of each row: every column of the product is that sum."""
        return plt.dot(weights, jnp.ones((self.tile, SUM_COLUMNS), weights.dtype)).max(axis=1)

    def _weights(self, scores, factor: float, peak):
        """exp2(scores * factor - peak)."""
        if not self.in_assembly:
            return jnp.exp2(scores * factor - peak)
        # Else these are 6 instructions in place of 2: no fused product, and a case for results below 2**-126.
        bits = struct.unpack("<I", struct.pack("<f", factor))[0]
        (weights,) = plt.elementwise_inline_asm(
            f"{{ .reg .f32 x; fma.rn.f32 x, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, x; }}",
            args=[scores, jnp.broadcast_to(-peak, scores.shape)],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, scores.dtype)],
        )
        return weights

    def _slots(self, positions, valid):
        """Places of these positions in the flat cache."""
        block_size = self.shape.block_size
        entries = self.context.tables.at[self.context.row, positions // block_size]
        block = plt.load(entries) if valid is None else plt.load(entries, mask=valid, other=0)
        return block * block_size + positions % block_size

    def _seen(self, positions, valid):
        distance = self.position[:, None] - positions[None, :]
        seen = (distance >= 0) & valid[None, :]
        return seen if self.options.window is None else seen & (distance < self.options.window)

    def _load(self, pages, slots, valid):
        """[slots, columns] of the head; 0 where not valid, whatever lies there."""
        columns = jnp.arange(self.shape.columns)
        entries = pages.at[slots[:, None], self.context.head, columns[None, :]]
        padded = self.shape.columns > self.shape.head_dim
        if valid is None and not padded:
            return plt.load(entries)
        mask = (columns < self.shape.head_dim)[None, :] if padded else True
        mask = mask if valid is None else valid[:, None] & mask
        return plt.load(entries, mask=jnp.broadcast_to(mask, (self.tile, self.shape.columns)), other=0)
