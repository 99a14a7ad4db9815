"""From the merged projection to attention: queries and keys normed and rotated, keys and values written.

One pass over the projection's result, in place of a dozen small operations. Pairs that are rotated are
dimension i and i + rotary_dim / 2 (arXiv:2104.09864, as in Hugging Face checkpoints). The norm is that of
one head (arXiv:2010.04245). Invariant: a token's slot is written by that token alone; padding writes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jaxllm.kernels.backend import Backend
from jaxllm.kernels.linear import add_up

MANY_TOKENS, TOKENS_PER_PROGRAM = 256, 16


class HeadNorm(NamedTuple):
    """RMS norm of each query and key head."""

    scale: Float[Array, "qk head_dim"]
    """Float32; the last row is the key's."""
    eps: float


def rotate_and_write(
    qkv: Float[Array, "splits tokens kv_heads qkv head_dim"],
    cos: Float[Array, "tokens half_dim"],
    sin: Float[Array, "tokens half_dim"],
    k_cache: Float[Array, "blocks block_size kv_heads head_dim"],
    v_cache: Float[Array, "blocks block_size kv_heads head_dim"],
    block: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
    *,
    norm: HeadNorm | None = None,
    dtype: jnp.dtype | None = None,
    invariant: bool = False,
    backend: Backend = "xla",
) -> tuple[Float[Array, "tokens heads head_dim"], Array, Array]:
    """Rotated queries, and the cache with the tokens' rotated keys and values.

    Args:
        qkv: per K/V head its queries, then its key, then its value; as parts of a sum.
        cos: float32 cosines of every token's angles; dimensions past twice their number are not rotated.
        sin: likewise.
        k_cache: written in place if it is donated.
        v_cache: likewise.
        block: where each token's K/V belongs; a block past the last one is dropped.
        offset: place in that block.
        norm: applied to queries and keys before they are rotated.
        dtype: of the sum, and of the queries that are returned; by default that of the parts.
        invariant: a token's result has the same bits among any number of tokens; not with "xla".
        backend: "xla" runs on any device, "pallas" on GPUs.
    """
    dtype = qkv.dtype if dtype is None else dtype
    if backend == "xla":
        qkv = add_up(qkv, dtype)
        qk = qkv[:, :, :-1]
        rotated = rotate(qk if norm is None else _norm_heads(qk, norm), cos, sin)
        q = rotated[:, :, :-1].reshape(qkv.shape[0], -1, qkv.shape[-1])
        new = (rotated[:, :, -1], qkv[:, :, -1])
        return q, *(_write(pages, kv, block, offset) for pages, kv in zip((k_cache, v_cache), new, strict=True))
    # A norm is a sum, whose order depends on how many tokens a program has.
    tokens = TOKENS_PER_PROGRAM if qkv.shape[1] > MANY_TOKENS and not (norm and invariant) else 1
    sizes = _Sizes(tokens, qkv.shape[3] - 2, qkv.shape[4], cos.shape[1], norm.eps if norm else None)
    scale = norm.scale if norm else jnp.zeros((1, 1))
    arrays = qkv, cos, sin, scale, block, offset, k_cache, v_cache
    return _call(arrays, sizes, dtype, interpret=backend == "pallas_interpret")


def rotate(
    x: Float[Array, "tokens *heads head_dim"],
    cos: Float[Array, "tokens half_dim"],
    sin: Float[Array, "tokens half_dim"],
) -> Float[Array, "tokens *heads head_dim"]:
    """Rotates every head's vector by its token's angles; float32 inside, x's dtype out."""
    middle, half = (1,) * (x.ndim - 2), cos.shape[-1]
    cos, sin = (table.reshape(table.shape[0], *middle, -1) for table in (cos, sin))
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*parts, rest] if rest.size else parts, axis=-1).astype(x.dtype)


def _norm_heads(qk, norm: HeadNorm):
    wide = qk.astype(jnp.float32)
    squares = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + norm.eps) * norm.scale).astype(qk.dtype)


def _write(pages, new, block, offset):
    return pages.at[block, offset].set(new.astype(pages.dtype), mode="drop", unique_indices=True)


class _Sizes(NamedTuple):
    tokens: int
    """Of a program."""
    group: int
    head_dim: int
    half: int
    eps: float | None

    @property
    def rest(self) -> int:
        """Dimensions that are not rotated."""
        return self.head_dim - 2 * self.half


def _call(arrays: tuple[Array, ...], sizes: _Sizes, dtype, *, interpret: bool):
    num_tokens, num_kv_heads, tokens = *arrays[0].shape[1:3], sizes.tokens
    k_cache, v_cache = arrays[-2:]
    q, k_cache, v_cache = pl.pallas_call(
        partial(_kernel, sizes=sizes),
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, num_kv_heads, sizes.group, sizes.head_dim), dtype),
            jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype),
            jax.ShapeDtypeStruct(v_cache.shape, v_cache.dtype),
        ],
        grid=(pl.cdiv(num_tokens, tokens), num_kv_heads),
        input_output_aliases={6: 1, 7: 2},
        compiler_params=plt.CompilerParams(num_warps=1 if tokens == 1 else 4, num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(*arrays)
    return q.reshape(num_tokens, -1, sizes.head_dim), k_cache, v_cache


def _kernel(qkv, cos, sin, scale, block, offset, k_in, v_in, q_out, k_out, v_out, *, sizes: _Sizes):
    del k_in, v_in  # the same memory as the outputs
    head, num_blocks = pl.program_id(1), k_out.shape[0]
    token = pl.program_id(0) * sizes.tokens + jnp.arange(sizes.tokens)
    exists = token < qkv.shape[1]
    to_block = plt.load(block.at[token], mask=exists, other=num_blocks)
    to_offset = plt.load(offset.at[token], mask=exists, other=0)
    written = exists & (to_block < num_blocks)
    half = _Columns(0, sizes.half, exists)
    turn = [half.load(table.at, token).astype(jnp.float32) for table in (cos, sin)]
    for index in range(sizes.group + 2):
        parts = [part.load_sum(qkv, token, head, index).astype(q_out.dtype) for part in _parts(sizes, exists)]
        if index <= sizes.group:
            if sizes.eps is not None:
                parts = _normed(parts, scale, index, sizes, exists)
            parts = _rotated(parts, *turn)
        for part, values in zip(_parts(sizes, exists), parts, strict=True):
            if index < sizes.group:
                part.store(q_out.at, values, exists, token, head, index)
            else:
                cache = k_out if index == sizes.group else v_out
                part.store(cache.at, values, written, to_block, to_offset, head)


class _Columns(NamedTuple):
    """A run of dimensions of a head, padded to a power of two."""

    begin: int
    size: int
    exists: Array

    @property
    def index(self) -> Array:
        return self.begin + jnp.arange(pl.next_power_of_2(self.size))

    def load(self, at, token, *where, first=()):
        mask = self.exists[:, None] & (self.index < self.begin + self.size)[None, :]
        return plt.load(at[(*first, token[:, None], *where, self.index[None, :])], mask=mask, other=0)

    def load_sum(self, ref, token, *where):
        """Of the parts along the first axis, in order."""
        total = self.load(ref.at, token, *where, first=(0,))
        for part in range(1, ref.shape[0]):
            total += self.load(ref.at, token, *where, first=(part,))
        return total

    def store(self, at, values, mask, *where):
        where = tuple(index[:, None] if getattr(index, "ndim", 0) else index for index in where)
        mask = mask[:, None] & (self.index < self.begin + self.size)[None, :]
        to = at[(*where, self.index[None, :])]
        plt.store(to, values.astype(to.ref.dtype), mask=mask)


def _parts(sizes: _Sizes, exists) -> list[_Columns]:
    """Both halves of what is rotated, and what is not, if there is any."""
    halves = [_Columns(0, sizes.half, exists), _Columns(sizes.half, sizes.half, exists)]
    return [*halves, _Columns(2 * sizes.half, sizes.rest, exists)] if sizes.rest else halves


def _rotated(parts, cos, sin):
    first, second, *rest = parts
    dtype, first, second = first.dtype, first.astype(jnp.float32), second.astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return [*(part.astype(dtype) for part in turned), *rest]


def _normed(parts, scale, index: int, sizes: _Sizes, exists):
    wide = [part.astype(jnp.float32) for part in parts]
    squares = sum(jnp.sum(part * part, axis=1) for part in wide) / sizes.head_dim
    inverse = jax.lax.rsqrt(squares + sizes.eps)[:, None]
    everywhere = jnp.zeros_like(exists, jnp.int32) + index
    scales = [columns.load(scale.at, everywhere) for columns in _parts(sizes, exists)]
    return [(part * inverse * by).astype(parts[0].dtype) for part, by in zip(wide, scales, strict=True)]
