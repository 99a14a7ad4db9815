"""The one decoder. A model family is a `ModelConfig`, never a subclass."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.config import LayerKind, ModelConfig, RopeConfig
from jaxllm.models.attention import Attention, LayerCache, Placement
from jaxllm.models.layers import Embedding, GatedMLP, RMSNorm, Setting
from jaxllm.models.rope import inverse_frequencies, rope_tables

type Rotation = tuple[Array, Array]
"""Cosines and sines of every token."""


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a norm before it, after it or both, and added to the stream."""

    def __init__(self, config: ModelConfig, kind: LayerKind, setting: Setting):
        size, eps = config.hidden_size, config.rms_norm_eps
        before, after = config.norms != "after", config.norms != "before"
        self.attention_norm = RMSNorm(size, eps) if before else None
        self.attention = Attention(config, kind, setting)
        self.attention_post_norm = RMSNorm(size, eps) if after else None
        self.mlp_norm = RMSNorm(size, eps) if before else None
        self.mlp = GatedMLP(config, setting)
        self.mlp_post_norm = RMSNorm(size, eps) if after else None

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotation: Rotation, cache: LayerCache, placement: Placement
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache]:
        with jax.named_scope("attention"):
            attended, cache = self.attention(_normed(self.attention_norm, x), rotation, cache, placement)
            x = x + _normed(self.attention_post_norm, attended)
        with jax.named_scope("mlp"):
            x = x + _normed(self.mlp_post_norm, self.mlp(_normed(self.mlp_norm, x)))
        return x, cache


def _normed(norm: RMSNorm | None, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """Token ids to hidden states to logits. Layers are unrolled: a scan would copy each layer's cache."""

    def __init__(self, config: ModelConfig, setting: Setting):
        self.config, self.setting = config, setting
        self.embed = Embedding(config.vocab_size, config.hidden_size, setting)
        self.layers = nnx.List([DecoderLayer(config, kind, setting) for kind in config.layer_kinds])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(config.vocab_size, config.hidden_size, setting)

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        cache: tuple[LayerCache, ...],
        placement: Placement,
    ) -> tuple[Float[Array, "tokens hidden"], tuple[LayerCache, ...]]:
        """Hidden states after the last layer, and the cache with the tokens' K/V written."""
        with jax.named_scope("embed"):
            x = self.embed(token_ids)
            if self.config.scale_embeddings:
                x = x * math.sqrt(self.config.hidden_size)
            ropes = self.config.layer_ropes
            rotations = {rope: self._rotation(rope, positions) for rope in dict.fromkeys(ropes)}
        written = []
        for index, (layer, rope, layer_cache) in enumerate(zip(self.layers, ropes, cache, strict=True)):
            with jax.named_scope(f"layer_{index:02d}"):
                x, layer_cache = _run_layer(*nnx.split(layer), x, rotations[rope], layer_cache, placement)
            written.append(layer_cache)
        return x, tuple(written)

    def _rotation(self, rope: RopeConfig, positions: Int[Array, " tokens"]) -> Rotation:
        frequencies = inverse_frequencies(rope, self.config.head_dim)
        # Kept from being fused into, and computed again in, every layer.
        return jax.lax.optimization_barrier(rope_tables(positions, frequencies, rope.attention_factor))

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Float32 logits of hidden states that `__call__` returned."""
        with jax.named_scope("head"):
            logits = (self.lm_head or self.embed).logits(self.final_norm(hidden))
            cap = self.config.logit_soft_cap
            return logits if cap is None else cap * jnp.tanh(logits / cap)


@partial(jax.jit, static_argnums=0)
def _run_layer(graph: nnx.GraphDef[DecoderLayer], state: nnx.State, *arguments):
    """A layer as a function of its parameters: equal layers are traced and lowered once."""
    return nnx.merge(graph, state)(*arguments)
