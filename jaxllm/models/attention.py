"""The attention layer: projections, rotation, K/V write, paged attention.

K/V are written to their slots before attention reads them, so a token sees itself and requests of the
same step that share a block see each other's.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.config import LayerKind, ModelConfig
from jaxllm.kernels.ragged_paged_attention import Work, attend
from jaxllm.models.layers import Projection, QKNorm, Setting
from jaxllm.models.rope import rotate
from jaxllm.parallel.sharding import KV_AXES, KV_CACHE_AXES, QUERY_AXES, partition_spec


class LayerCache(NamedTuple):
    """K/V of one layer."""

    keys: Float[Array, "blocks block_size kv_heads head_dim"]
    values: Float[Array, "blocks block_size kv_heads head_dim"]


class Placement(NamedTuple):
    """Where the tokens of a step belong; the same for every layer."""

    block: Int[Array, " tokens"]
    """Block each token's K/V is written to; padding tokens name one past the last, which is dropped."""
    offset: Int[Array, " tokens"]
    """Place in that block."""
    attention_work: Work


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) over the paged cache."""

    def __init__(self, config: ModelConfig, kind: LayerKind, setting: Setting):
        hidden, head_dim = ("hidden", config.hidden_size), ("head_dim", config.head_dim)
        kv_heads, heads = ("kv_heads", config.num_kv_heads), ("heads", config.num_heads)
        group = ("qkv", config.group_size + 2)
        self.qkv = Projection([hidden], [kv_heads, group, head_dim], setting, config.attention_bias)
        self.qk_norm = None if config.qk_norm == "none" else QKNorm(config)
        self.out = Projection([heads, head_dim], [hidden], setting, config.attention_out_bias)
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.window, self.soft_cap, self.setting = kind.window, config.attention_soft_cap, setting

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        rotation: tuple[Array, Array],
        cache: LayerCache,
        placement: Placement,
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache]:
        q, k, v = self.split(self.qkv(x), rotation)
        out, cache = self.write_and_attend(q, k, v, cache, placement)
        return self.out(out), cache

    def split(self, qkv: Float[Array, "tokens kv_heads qkv head_dim"], rotation: tuple[Array, Array]):
        """Rotated queries [tokens, heads, head_dim], rotated keys and values [tokens, kv_heads, head_dim]."""
        qk = qkv[:, :, :-1]
        rotated = rotate(qk if self.qk_norm is None else self.qk_norm(qk), *rotation)
        q = rotated[:, :, :-1].reshape(qkv.shape[0], -1, qkv.shape[-1])
        return q, rotated[:, :, -1], qkv[:, :, -1]

    def write_and_attend(self, q, k, v, cache: LayerCache, placement: Placement) -> tuple[Array, LayerCache]:
        """Each device does its own heads: attention needs nothing of the others'."""
        heads, kv = partition_spec(QUERY_AXES), partition_spec(KV_AXES)
        pages = partition_spec(KV_CACHE_AXES)  # of keys and of values
        options = {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}
        read = partial(attend, **options, backend=self.setting.attention_backend)
        local = jax.shard_map(
            partial(_write_and_attend, read),
            mesh=self.setting.mesh,
            in_specs=(heads, kv, kv, pages, PartitionSpec()),
            out_specs=(heads, pages),
            check_vma=False,
        )
        return local(q, k, v, cache, placement)


def _write_and_attend(read, q, k, v, cache: LayerCache, placement: Placement) -> tuple[Array, LayerCache]:
    with jax.named_scope("write_kv"):
        cache = LayerCache(*(_write(pages, new, placement) for pages, new in zip(cache, (k, v), strict=True)))
    with jax.named_scope("paged_attention"):
        out = read(q, cache.keys, cache.values, placement.attention_work)
    return out, cache


def _write(pages: Array, new: Array, placement: Placement) -> Array:
    slots = (placement.block, placement.offset)
    return pages.at[slots].set(new.astype(pages.dtype), mode="drop", unique_indices=True)
