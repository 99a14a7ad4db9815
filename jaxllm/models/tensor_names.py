"""What the decoder's parameters are called in checkpoint files.

One map for each file format, and variants of it for families that have other tensors. A map may name
tensors for parameters that a model lacks (biases, norms): only a model's own parameters are looked up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from jaxllm.model_config import ModelConfig


@dataclass(frozen=True)
class NameMap:
    """Tensor names of one file format."""

    sources: Mapping[str, tuple[str, ...]]
    """For each parameter the tensors it is made of, in order, or one in which they lie below one another; `{i}`
    stands for the layer's number."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that hold nothing the configuration does not say."""
    ignored_when_tied: tuple[str, ...] = ()
    """Patterns of tensors that repeat the embedding where it is the output head too."""
    ignored_when_known: tuple[str, ...] = ()
    """Patterns of tensors that hold factors of rope frequencies, which the configuration has then."""
    changes: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    """By pattern: what a tensor needs to become what the decoder computes with."""

    def sources_of(self, param: str) -> tuple[str, ...]:
        """Names of the tensors that parameter `param` ("layers.3.mlp.down.weight") is made of."""
        layer = re.match(r"layers\.(\d+)\.", param)
        template = param if layer is None else f"layers.{{i}}.{param[layer.end() :]}"
        assert template in self.sources, f"no tensor names for parameter {param!r}: add them to the family"
        return tuple(name.format(i=layer and layer[1]) for name in self.sources[template])

    def is_ignored(self, tensor: str, config: ModelConfig) -> bool:
        """Whether a tensor that no parameter uses is known and harmless."""
        patterns = self.ignored + (self.ignored_when_tied if config.tie_word_embeddings else ())
        patterns += self.ignored_when_known if config.rope.freq_factors else ()
        return any(fnmatchcase(tensor, pattern) for pattern in patterns)

    def correct(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """The tensor as the decoder computes with it."""
        for pattern, change in self.changes.items():
            tensor = change(tensor) if fnmatchcase(name, pattern) else tensor
        return tensor


def _linear(param: str, *tensors: str) -> dict[str, tuple[str, ...]]:
    return {f"{param}.{part}": tuple(f"{tensor}.{part}" for tensor in tensors) for part in ("weight", "bias")}


def _variant(names: NameMap, sources: Mapping[str, tuple[str, ...]]) -> NameMap:
    return dataclasses.replace(names, sources={**names.sources, **sources})


HF = NameMap(
    {
        "embed.weight": ("model.embed_tokens.weight",),
        "layers.{i}.attention_norm.scale": ("model.layers.{i}.input_layernorm.weight",),
        **_linear(
            "layers.{i}.attention.qkv",
            "model.layers.{i}.self_attn.q_proj",
            "model.layers.{i}.self_attn.k_proj",
            "model.layers.{i}.self_attn.v_proj",
        ),
        "layers.{i}.attention.qk_norm.scale": (
            "model.layers.{i}.self_attn.q_norm.weight",
            "model.layers.{i}.self_attn.k_norm.weight",
        ),
        **_linear("layers.{i}.attention.out", "model.layers.{i}.self_attn.o_proj"),
        "layers.{i}.mlp_norm.scale": ("model.layers.{i}.post_attention_layernorm.weight",),
        **_linear("layers.{i}.mlp.gate_up", "model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
        **_linear("layers.{i}.mlp.down", "model.layers.{i}.mlp.down_proj"),
        "final_norm.scale": ("model.norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
    },
    ignored=("*.rotary_emb.inv_freq",),
    ignored_when_tied=("lm_head.weight",),
)

HF_AFTER = _variant(
    HF,
    {
        "layers.{i}.attention_post_norm.scale": ("model.layers.{i}.post_attention_layernorm.weight",),
        "layers.{i}.mlp_norm.scale": ("model.layers.{i}.pre_feedforward_layernorm.weight",),
        "layers.{i}.mlp_post_norm.scale": ("model.layers.{i}.post_feedforward_layernorm.weight",),
    },
)
"""Of models with norms after attention and feed-forward; elsewhere post_attention_layernorm comes before the latter."""

HF_FUSED = _variant(
    HF,
    {
        "layers.{i}.attention.qkv.weight": ("model.layers.{i}.self_attn.qkv_proj.weight",),
        "layers.{i}.mlp.gate_up.weight": ("model.layers.{i}.mlp.gate_up_proj.weight",),
    },
)
"""Of models whose projections of the same input are one tensor."""

GGUF = NameMap(
    {
        "embed.weight": ("token_embd.weight",),
        "layers.{i}.attention_norm.scale": ("blk.{i}.attn_norm.weight",),
        **_linear("layers.{i}.attention.qkv", "blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v"),
        "layers.{i}.attention.qk_norm.scale": ("blk.{i}.attn_q_norm.weight", "blk.{i}.attn_k_norm.weight"),
        **_linear("layers.{i}.attention.out", "blk.{i}.attn_output"),
        "layers.{i}.mlp_norm.scale": ("blk.{i}.ffn_norm.weight",),
        **_linear("layers.{i}.mlp.gate_up", "blk.{i}.ffn_gate", "blk.{i}.ffn_up"),
        **_linear("layers.{i}.mlp.down", "blk.{i}.ffn_down"),
        "final_norm.scale": ("output_norm.weight",),
        "lm_head.weight": ("output.weight",),
    },
    ignored_when_known=("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
)

GGUF_AFTER = _variant(
    GGUF,
    {
        "layers.{i}.attention_post_norm.scale": ("blk.{i}.post_attention_norm.weight",),
        "layers.{i}.mlp_post_norm.scale": ("blk.{i}.post_ffw_norm.weight",),
    },
)

GGUF_FUSED = _variant(
    GGUF,
    {
        "layers.{i}.attention.qkv.weight": ("blk.{i}.attn_qkv.weight",),
        "layers.{i}.mlp.gate_up.weight": ("blk.{i}.ffn_up.weight",),
    },
)


def with_one_added(names: NameMap) -> NameMap:
    """The map of a family that stores its norms' scales less 1 (GGUF files hold them as they are used)."""
    # In float32: bfloat16 has few digits left beside the 1.
    return dataclasses.replace(names, changes={"*norm.weight": lambda tensor: tensor.astype(np.float32) + 1})


def below(prefix: str, names: NameMap, ignored: tuple[str, ...] = ()) -> NameMap:
    """The map of a model that is a part of a larger one, whose other tensors are `ignored`."""
    sources = {param: tuple(prefix + name for name in tensors) for param, tensors in names.sources.items()}
    tied = tuple(prefix + name for name in names.ignored_when_tied)
    return dataclasses.replace(names, sources=sources, ignored=names.ignored + ignored, ignored_when_tied=tied)
