"""Model families as data: how to read their configuration and what their tensors are called.

Everything that tells one family's checkpoints from another's is here; the decoder itself only sees
`ModelConfig` and its own parameter names. A new family is one more `Family` in `FAMILIES`; the page
ADDING_A_FAMILY.md in this folder goes through it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.models import gguf_config, hf_config
from jaxllm.models.tensor_names import (
    GGUF,
    GGUF_AFTER,
    GGUF_FUSED,
    HF,
    HF_AFTER,
    HF_FUSED,
    NameMap,
    below,
    with_one_added,
)

type Correction = Callable[[np.ndarray, ModelConfig], np.ndarray]
"""Undoes what a converter did to a tensor: array in the file's layout to array in Hugging Face's."""


@dataclass(frozen=True)
class Family:
    """One model family."""

    name: str
    hf_architectures: tuple[str, ...]
    """What `architectures` in config.json may say."""
    gguf_architecture: str
    """What `general.architecture` says in GGUF metadata; the first family it fits reads the file."""
    hf_names: NameMap = HF
    gguf_names: NameMap = GGUF
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that are the same for all models of the family, and that no file says."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for fields that config.json leaves out, where it is not Llama's default. Naming a
    field of `hf_config._UNKNOWN` says that the family knows it."""
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What llama.cpp takes for metadata that is left out, by the key below the architecture; likewise."""
    gguf_unsaid: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: {}
    """Fields of `ModelConfig` that llama.cpp derives from others."""
    gguf_corrections: Mapping[str, Correction] = field(default_factory=dict)
    """By the tensor's name without layer and ending, as "attn_q" of "blk.3.attn_q.weight"."""
    verified: str = "tiny model: logits against transformers"
    """What was compared with what; `jaxllm models` shows it."""

    def config_from_hf(self, fields: Mapping[str, Any]) -> ModelConfig:
        """See `hf_config.decoder_config`. Models that see, too, keep the decoder's fields in text_config."""
        given = {**(fields.get("text_config") or {}), **fields}
        config = hf_config.decoder_config(self.name, self.hf_defaults, given)
        return dataclasses.replace(config, **self.traits)

    def config_from_gguf(self, metadata: Mapping[str, Any], shapes: gguf_config.Shapes) -> ModelConfig:
        """See `gguf_config.decoder_config`."""
        config = gguf_config.decoder_config(self.name, self.gguf_defaults, metadata, shapes)
        return dataclasses.replace(config, **self.traits, **self.gguf_unsaid(config))


class Row(NamedTuple):
    """A family as `jaxllm models` lists it."""

    family: str
    hf_architectures: str
    gguf_architecture: str
    verified: str


def supported() -> list[Row]:
    """Every family, in the order of `FAMILIES`."""
    return [Row(f.name, ", ".join(f.hf_architectures), f.gguf_architecture, f.verified) for f in FAMILIES]


def family_of_hf(architectures: Sequence[str]) -> Family:
    """The family of a Hugging Face checkpoint.

    Raises:
        ValueError: none of the architectures is supported.
    """
    for family in FAMILIES:
        if set(family.hf_architectures) & set(architectures):
            return family
    known = [name for family in FAMILIES for name in family.hf_architectures]
    raise _unsupported(f"config.json: architectures={list(architectures)}", " ".join(architectures), known)


def family_of_gguf(architecture: str) -> Family:
    """The family of a GGUF file.

    Raises:
        ValueError: the architecture is not supported.
    """
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    known = [family.gguf_architecture for family in FAMILIES]
    raise _unsupported(f"general.architecture={architecture!r}", architecture, known)


def _unsupported(found: str, name: str, known: Sequence[str]) -> ValueError:
    (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    names = ", ".join(dict.fromkeys(known))
    return ValueError(f"{found} is not supported; the nearest that is: {nearest}. Use a model of one of {names}")


def _unpermute_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs (2j, 2j + 1) back to halves (j, j + head_dim / 2).

    llama.cpp rotates neighbouring rows of llama models, so its converter put each pair side by side.
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _scale_of_27b(num_layers: int, config: ModelConfig) -> Mapping[str, Any]:
    """Gemma's 27B models, known by their number of layers, scale scores by the width of a head in the stream."""
    if config.num_layers != num_layers:
        return {}
    return {"attention_scale": (config.hidden_size / config.num_heads) ** -0.5}


LLAMA = Family(
    name="llama",
    hf_architectures=("LlamaForCausalLM",),
    gguf_architecture="llama",
    hf_defaults={"attention_bias": False, "mlp_bias": False},
    gguf_corrections={
        "attn_q": lambda tensor, config: _unpermute_rows(tensor, config.num_heads),
        "attn_k": lambda tensor, config: _unpermute_rows(tensor, config.num_kv_heads),
    },
    verified="SmolLM2-135M: greedy tokens against transformers; tiny model: logits, with every kind of rope",
)
"""Llama 2, 3 and 3.x, and what shares their shape: SmolLM2, Mistral files converted to GGUF."""

MISTRAL = Family(
    name="mistral",
    hf_architectures=("MistralForCausalLM",),
    gguf_architecture="llama",
    hf_defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
)

QWEN2 = Family(
    name="qwen2",
    hf_architectures=("Qwen2ForCausalLM",),
    gguf_architecture="qwen2",
    traits={"attention_bias": True, "attention_out_bias": False},
    hf_defaults={
        "attention_bias": True,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
)
"""Qwen 2 and 2.5."""

QWEN3 = Family(
    name="qwen3",
    hf_architectures=("Qwen3ForCausalLM",),
    gguf_architecture="qwen3",
    traits={"qk_norm": "head"},
    hf_defaults={**QWEN2.hf_defaults, "attention_bias": False, "head_dim": 128},
)

_GEMMA_TRAITS = {"norms": "around", "activation": "gelu_tanh", "scale_embeddings": True}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}

GEMMA2 = Family(
    name="gemma2",
    hf_architectures=("Gemma2ForCausalLM",),
    gguf_architecture="gemma2",
    hf_names=with_one_added(HF_AFTER),
    gguf_names=GGUF_AFTER,
    traits=_GEMMA_TRAITS,
    hf_defaults={
        **_GEMMA_DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    gguf_defaults={
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "attention.sliding_window": 4096,
        "attention.sliding_window_pattern": 2,
    },
    gguf_unsaid=partial(_scale_of_27b, 46),
)

GEMMA3 = Family(
    name="gemma3",
    hf_architectures=("Gemma3ForCausalLM",),
    gguf_architecture="gemma3",
    hf_names=with_one_added(HF_AFTER),
    gguf_names=GGUF_AFTER,
    traits={**_GEMMA_TRAITS, "qk_norm": "head"},
    hf_defaults={
        **_GEMMA_DEFAULTS,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
    gguf_defaults={
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
        "attention.sliding_window": 0,
        "attention.sliding_window_pattern": 6,
        "final_logit_softcapping": 0.0,
    },
    gguf_unsaid=partial(_scale_of_27b, 62),
    verified="gemma3-270m: greedy tokens against transformers; tiny model: logits",
)
"""Gemma 3 of 270M and 1B."""

GEMMA3_WITH_VISION = dataclasses.replace(
    GEMMA3,
    hf_architectures=("Gemma3ForConditionalGeneration",),
    hf_names=below("language_model.", GEMMA3.hf_names, ignored=("vision_tower.*", "multi_modal_projector.*")),
    verified="text only; configuration and tensor names, the rest is gemma3's",
)
"""Gemma 3 from 4B on: its text half."""

PHI3 = Family(
    name="phi3",
    hf_architectures=("Phi3ForCausalLM",),
    gguf_architecture="phi3",
    hf_names=HF_FUSED,
    gguf_names=GGUF_FUSED,
    hf_defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
    },
    gguf_defaults={"rope.dimension_count": None, "attention.sliding_window": 0},
)
"""Phi-3, 3.5 and the text models of Phi-4."""

OLMO2 = Family(
    name="olmo2",
    hf_architectures=("Olmo2ForCausalLM",),
    gguf_architecture="olmo2",
    hf_names=HF_AFTER,
    gguf_names=GGUF_AFTER,
    traits={"norms": "after", "qk_norm": "all"},
    hf_defaults={"attention_bias": False, "rms_norm_eps": 1e-5},
    # Of Olmo 3, whose files say the same architecture. The base of windowed layers is the model's, never scaled.
    gguf_defaults={"attention.sliding_window": 0, "attention.sliding_window_pattern": 4, "rope.freq_base_swa": None},
)

OLMO3 = dataclasses.replace(
    OLMO2,
    name="olmo3",
    hf_architectures=("Olmo3ForCausalLM",),
    hf_defaults={
        **OLMO2.hf_defaults,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 500000.0,
        "rope_local_base_freq": 500000.0,
    },
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, GEMMA3_WITH_VISION, PHI3, OLMO2, OLMO3)
