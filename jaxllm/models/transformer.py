"""The one decoder. A model family is a `ModelConfig`, never a subclass."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.kernels.linear import add_up
from jaxllm.model_config import LayerKind, ModelConfig, RopeConfig
from jaxllm.models.attention import Attention, LayerCache, Placement
from jaxllm.models.layers import Embedding, GatedMLP, RMSNorm, Setting
from jaxllm.models.rope import inverse_frequencies, rope_tables

type Rotation = tuple[Array, Array]
"""Cosines and sines of every token."""


class Stream(NamedTuple):
    """The residual stream, with what the last part of a layer adds to it: the next norm does both at once."""

    x: Float[Array, "tokens hidden"]
    added: Float[Array, "splits tokens hidden"] | None
    """In parts, which are added up in passing."""

    def enter(self, norm: RMSNorm | None) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        """The sum, and its norm, or the sum again where there is no norm."""
        if norm is not None:
            return norm.after_adding(self.x, self.added)
        total = self.x if self.added is None else self.x + add_up(self.added, self.x.dtype)
        return total, total


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a norm before it, after it or both, and added to the stream."""

    def __init__(self, config: ModelConfig, kind: LayerKind, setting: Setting):
        before, after = config.norms != "after", config.norms != "before"
        self.attention_norm = RMSNorm(config, setting) if before else None
        self.attention = Attention(config, kind, setting)
        self.attention_post_norm = RMSNorm(config, setting) if after else None
        self.mlp_norm = RMSNorm(config, setting) if before else None
        self.mlp = GatedMLP(config, setting)
        self.mlp_post_norm = RMSNorm(config, setting) if after else None

    def __call__(
        self, stream: Stream, rotation: Rotation, cache: LayerCache, placement: Placement
    ) -> tuple[Stream, LayerCache]:
        with jax.named_scope("attention"):
            x, normed = stream.enter(self.attention_norm)
            attended, cache = self.attention(normed, rotation, cache, placement)
            stream = Stream(x, _normed(self.attention_post_norm, attended, x.dtype))
        with jax.named_scope("mlp"):
            x, normed = stream.enter(self.mlp_norm)
            stream = Stream(x, _normed(self.mlp_post_norm, self.mlp(normed), x.dtype))
        return stream, cache


def _normed(norm: RMSNorm | None, parts: Float[Array, "splits tokens hidden"], dtype: jnp.dtype) -> Array:
    """The norm of the sum, as one part; without a norm, the parts."""
    return parts if norm is None else norm(add_up(parts, dtype))[None]


class Decoder(nnx.Module):
    """Token ids to hidden states to logits. Layers are unrolled: a scan would copy each layer's cache."""

    def __init__(self, config: ModelConfig, setting: Setting):
        self.config, self.setting = config, setting
        self.embed = Embedding(config.vocab_size, config.hidden_size, setting)
        self.layers = nnx.List([DecoderLayer(config, kind, setting) for kind in config.layer_kinds])
        self.final_norm = RMSNorm(config, setting)
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
        stream, written = Stream(x, None), []
        for index, (layer, rope, layer_cache) in enumerate(zip(self.layers, ropes, cache, strict=True)):
            with jax.named_scope(f"layer_{index:02d}"):
                stream, layer_cache = _run_layer(*nnx.split(layer), stream, rotations[rope], layer_cache, placement)
            written.append(layer_cache)
        with jax.named_scope("head"):
            return stream.enter(None)[0], tuple(written)

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
