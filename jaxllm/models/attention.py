"""The attention layer: projections, rotation, K/V write, paged attention.

K/V are written to their slots before attention reads them, so a token sees itself and requests of the
same step that share a block see each other's.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.kernels.ragged_paged_attention import Work, attend
from jaxllm.kernels.rotate_and_write import HeadNorm, rotate_and_write
from jaxllm.model_config import LayerKind, ModelConfig
from jaxllm.models.layers import Projection, QKNorm, Setting
from jaxllm.parallel.sharding import KV_CACHE_AXES, QKV_AXES, QUERY_AXES, REPLICATED, partition_spec


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
        self.qk_norm = None if config.qk_norm == "none" else QKNorm(config, setting)
        self.out = Projection([heads, head_dim], [hidden], setting, config.attention_out_bias)
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.window, self.soft_cap, self.setting = kind.window, config.attention_soft_cap, setting

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        rotation: tuple[Array, Array],
        cache: LayerCache,
        placement: Placement,
    ) -> tuple[Float[Array, "splits tokens hidden"], LayerCache]:
        """Parts of the result, and the cache with the tokens' K/V."""
        qkv, norm = self.qkv.parts(x), self.qk_norm
        if norm is not None and norm.over_all_heads:
            qkv, norm = norm.over_heads(self.qkv(x))[None], None
        out, cache = self._write_and_attend(qkv, rotation, cache, placement, norm)
        return self.out.parts(out), cache

    def _write_and_attend(
        self, qkv: Array, rotation: tuple[Array, Array], cache: LayerCache, placement: Placement, norm: QKNorm | None
    ) -> tuple[Array, LayerCache]:
        """Each device does its own heads: attention needs nothing of the others'."""
        pages = partition_spec(KV_CACHE_AXES)  # of keys and of values
        local = jax.shard_map(
            partial(self._of_local_heads, norm.eps if norm else 0.0),
            mesh=self.setting.mesh,
            in_specs=(partition_spec(QKV_AXES), REPLICATED, pages, REPLICATED, REPLICATED),
            out_specs=(partition_spec(QUERY_AXES), pages),
            check_vma=False,
        )
        return local(qkv, rotation, cache, placement, norm.scale[...] if norm else None)

    def _of_local_heads(
        self,
        eps: float,
        qkv: Float[Array, "splits tokens kv_heads qkv head_dim"],
        rotation: tuple[Array, Array],
        cache: LayerCache,
        placement: Placement,
        norm_scale: Float[Array, "qk head_dim"] | None,
    ) -> tuple[Float[Array, "tokens heads head_dim"], LayerCache]:
        backend = self.setting.backend
        norm = None if norm_scale is None else HeadNorm(norm_scale, eps)
        with jax.named_scope("write_kv"):
            q, keys, values = rotate_and_write(
                qkv,
                *rotation,
                *cache,
                placement.block,
                placement.offset,
                norm=norm,
                dtype=self.setting.dtype,
                invariant=self.setting.batch_invariant,
                backend=backend,
            )
        with jax.named_scope("paged_attention"):
            options = {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}
            out = attend(q, keys, values, placement.attention_work, **options, backend=backend)
        return out, LayerCache(keys, values)
