"""What a checkpoint is: the facts of a model in one vocabulary, whichever family and file format it comes in.

Frozen: whoever needs a model that differs makes another one. Nothing here depends on what a user chose.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies change for contexts longer than trained on."""

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """Which frequencies are divided by `factor`: all (linear), or low ones wholly and those in between partly."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """Turns in the original context below which a frequency is scaled wholly (yarn calls it beta_slow)."""
    high_freq_factor: float = 4.0
    """Turns in the original context above which a frequency is not scaled (yarn calls it beta_fast)."""
    original_max_position: int = 8192
    """Context length before the extension."""
    freq_factors: tuple[float, ...] = ()
    """Divisor of each frequency (longrope; GGUF files give llama3 in this form, too); empty: none."""
    short_freq_factors: tuple[float, ...] = ()
    """Instead of `freq_factors` where no context is longer than the original one (longrope)."""
    attention_factor: float = 1.0
    """Factor on cosines and sines (yarn, longrope)."""
    truncate: bool = True
    """Whether yarn's ramp begins and ends at whole dimensions."""
    rotary_dim: int | None = None
    """Dimensions of a head that are rotated, its first ones; None: all."""

    def for_context(self, max_model_len: int) -> RopeConfig:
        """The embedding where no context is longer than `max_model_len`."""
        if not self.short_freq_factors or max_model_len > self.original_max_position:
            return self
        return dataclasses.replace(self, freq_factors=self.short_freq_factors, short_freq_factors=())


@dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer. Layers of one kind share one traced function."""

    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None: all before it."""
    rope: RopeConfig | None = None
    """None: the model's."""


@dataclass(frozen=True)
class ModelConfig:
    """Facts of a checkpoint, in one vocabulary for every family and file format."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    layers: tuple[LayerKind, ...] = ()
    """One for each layer; empty: all are `LayerKind()`."""
    norms: Literal["before", "after", "around"] = "before"
    """Where attention and feed-forward have their norms; all lie outside of the residual stream."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """Whether queries and keys are normalised before rotation: each head by itself, or all heads as one vector."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scale_embeddings: bool = False
    """Whether token vectors are multiplied by the square root of `hidden_size`."""
    attention_scale: float | None = None
    """Factor on attention scores; None: head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    """Attention scores are squeezed into +- this number (arXiv:2408.00118)."""
    logit_soft_cap: float | None = None
    """Logits are squeezed into +- this number."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Whether the projections to queries, keys and values have a bias."""
    attention_out_bias: bool = False
    """Whether the projection of what attention returns has a bias."""
    mlp_bias: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type the checkpoint was stored in (float32 for quantised GGUF files)."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer: generation_config.json's where there is one."""
    sampling_defaults: tuple[tuple[str, float | int], ...] = ()
    """Names and values of `SamplingParams` that the checkpoint recommends."""

    @property
    def group_size(self) -> int:
        """Query heads that share one K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return self.layers or (LayerKind(),) * self.num_layers

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        """The position embedding of every layer."""
        return tuple(kind.rope or self.rope for kind in self.layer_kinds)

    def for_context(self, max_model_len: int) -> ModelConfig:
        """The model where no request is longer than `max_model_len`, which decides longrope's factors."""
        kinds = (LayerKind(kind.window, kind.rope and kind.rope.for_context(max_model_len)) for kind in self.layers)
        return dataclasses.replace(self, rope=self.rope.for_context(max_model_len), layers=tuple(kinds))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K/V cache one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
