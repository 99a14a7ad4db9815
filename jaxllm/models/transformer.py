"""The one decoder. A model family is a `ModelConfig`, never a subclass."""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.models.attention import Attention, LayerCache, Placement
from jaxllm.models.layers import Embedding, RMSNorm, Setting, SwiGLU
from jaxllm.models.rope import inverse_frequencies, rope_tables


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, setting: Setting):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, setting)
        self.attention = Attention(config, setting)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, setting)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, setting, config.mlp_bias)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        rotation: tuple[Array, Array],
        cache: LayerCache,
        placement: Placement,
    ) -> tuple[Float[Array, "tokens hidden"], LayerCache]:
        with jax.named_scope("attention"):
            attended, cache = self.attention(self.input_norm(x), rotation, cache, placement)
        x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_norm(x)), cache


class Decoder(nnx.Module):
    """Token ids to hidden states to logits. Layers are unrolled: a scan would copy each layer's cache."""

    def __init__(self, config: ModelConfig, setting: Setting):
        self.config, self.setting = config, setting
        self.embed = Embedding(config.vocab_size, config.hidden_size, setting)
        self.layers = nnx.List([DecoderLayer(config, setting) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, setting)
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
            rotation = rope_tables(positions, inverse_frequencies(self.config.rope, self.config.head_dim))
            # Kept from being fused into, and computed again in, every layer.
            rotation = jax.lax.optimization_barrier(rotation)
        written = []
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            with jax.named_scope(f"layer_{index:02d}"):
                x, layer_cache = _run_layer(*nnx.split(layer), x, rotation, layer_cache, placement)
            written.append(layer_cache)
        return x, tuple(written)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Float32 logits of hidden states that `__call__` returned."""
        with jax.named_scope("head"):
            return (self.lm_head or self.embed).logits(self.final_norm(hidden))


@partial(jax.jit, static_argnums=0)
def _run_layer(graph: nnx.GraphDef[DecoderLayer], state: nnx.State, *arguments):
    """A layer as a function of its parameters: equal layers are traced and lowered once."""
    return nnx.merge(graph, state)(*arguments)
