"""Model families as data: how to read their configuration and what their tensors are called.

Everything that tells one family's checkpoints from another's is here; the decoder itself only sees
`ModelConfig` and its own parameter names. A new family is one more `Family` in `FAMILIES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models import gguf_config, hf_config

type Correction = Callable[[np.ndarray, ModelConfig], np.ndarray]
"""Undoes what a converter did to a tensor: array in the file's layout to array in Hugging Face's."""


@dataclass(frozen=True)
class NameMap:
    """Tensor names of one file format."""

    sources: Mapping[str, tuple[str, ...]]
    """For each parameter the tensors it is made of, in order; `{i}` stands for the layer's number."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that hold nothing the configuration does not say."""
    ignored_when_tied: tuple[str, ...] = ()
    """Patterns of tensors that repeat the embedding where it is the output head too."""

    def sources_of(self, param: str) -> tuple[str, ...]:
        """Names of the tensors that parameter `param` ("layers.3.mlp.down.weight") is made of."""
        layer = re.match(r"layers\.(\d+)\.", param)
        template = param if layer is None else f"layers.{{i}}.{param[layer.end() :]}"
        assert template in self.sources, f"no tensor names for parameter {param!r}: add them to the family"
        return tuple(name.format(i=layer and layer[1]) for name in self.sources[template])

    def is_ignored(self, tensor: str, config: ModelConfig) -> bool:
        """Whether a tensor that no parameter uses is known and harmless."""
        patterns = self.ignored + (self.ignored_when_tied if config.tie_word_embeddings else ())
        return any(fnmatchcase(tensor, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Family:
    """One model family."""

    name: str
    hf_architectures: tuple[str, ...]
    """What `architectures` in config.json may say."""
    gguf_architecture: str
    """What `general.architecture` says in GGUF metadata."""
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_from_gguf: Callable[[Mapping[str, Any], gguf_config.Shapes], ModelConfig]
    hf_names: NameMap
    gguf_names: NameMap
    gguf_corrections: Mapping[str, Correction] = field(default_factory=dict)
    """By the tensor's name without layer and ending, as "attn_q" of "blk.3.attn_q.weight"."""


def family_of_hf(architectures: Sequence[str]) -> Family:
    """The family of a Hugging Face checkpoint.

    Raises:
        ValueError: none of the architectures is supported.
    """
    for family in FAMILIES:
        if set(family.hf_architectures) & set(architectures):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.hf_architectures)
    raise ValueError(f"config.json: architectures={list(architectures)} is not supported: use a model of {supported}")


def family_of_gguf(architecture: str) -> Family:
    """The family of a GGUF file.

    Raises:
        ValueError: the architecture is not supported.
    """
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    supported = ", ".join(family.gguf_architecture for family in FAMILIES)
    raise ValueError(f"general.architecture={architecture!r} is not supported: use a model of {supported}")


def _linear(param: str, *tensors: str) -> dict[str, tuple[str, ...]]:
    return {f"{param}.{part}": tuple(f"{tensor}.{part}" for tensor in tensors) for part in ("weight", "bias")}


def _unpermute_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs (2j, 2j + 1) back to halves (j, j + head_dim / 2).

    llama.cpp rotates neighbouring rows of llama models, so its converter put each pair side by side.
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


_LLAMA_HF = NameMap(
    {
        "embed.weight": ("model.embed_tokens.weight",),
        "layers.{i}.input_norm.scale": ("model.layers.{i}.input_layernorm.weight",),
        **_linear(
            "layers.{i}.attention.qkv",
            "model.layers.{i}.self_attn.q_proj",
            "model.layers.{i}.self_attn.k_proj",
            "model.layers.{i}.self_attn.v_proj",
        ),
        **_linear("layers.{i}.attention.out", "model.layers.{i}.self_attn.o_proj"),
        "layers.{i}.post_attention_norm.scale": ("model.layers.{i}.post_attention_layernorm.weight",),
        **_linear("layers.{i}.mlp.gate_up", "model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
        **_linear("layers.{i}.mlp.down", "model.layers.{i}.mlp.down_proj"),
        "final_norm.scale": ("model.norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
    },
    ignored=("*.rotary_emb.inv_freq",),
    ignored_when_tied=("lm_head.weight",),
)

_LLAMA_GGUF = NameMap(
    {
        "embed.weight": ("token_embd.weight",),
        "layers.{i}.input_norm.scale": ("blk.{i}.attn_norm.weight",),
        **_linear("layers.{i}.attention.qkv", "blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v"),
        **_linear("layers.{i}.attention.out", "blk.{i}.attn_output"),
        "layers.{i}.post_attention_norm.scale": ("blk.{i}.ffn_norm.weight",),
        **_linear("layers.{i}.mlp.gate_up", "blk.{i}.ffn_gate", "blk.{i}.ffn_up"),
        **_linear("layers.{i}.mlp.down", "blk.{i}.ffn_down"),
        "final_norm.scale": ("output_norm.weight",),
        "lm_head.weight": ("output.weight",),
    },
    ignored=("rope_freqs.weight",),  # is RopeConfig.freq_factors
)

LLAMA = Family(
    name="llama",
    hf_architectures=("LlamaForCausalLM",),
    gguf_architecture="llama",
    config_from_hf=partial(hf_config.decoder_config, "llama"),
    config_from_gguf=partial(gguf_config.decoder_config, "llama"),
    hf_names=_LLAMA_HF,
    gguf_names=_LLAMA_GGUF,
    gguf_corrections={
        "attn_q": lambda tensor, config: _unpermute_rows(tensor, config.num_heads),
        "attn_k": lambda tensor, config: _unpermute_rows(tensor, config.num_kv_heads),
    },
)
"""Llama 2, 3 and 3.x, and what shares their shape: SmolLM2, Mistral files converted to GGUF."""

FAMILIES = (LLAMA,)
