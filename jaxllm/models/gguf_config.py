"""GGUF metadata to `ModelConfig`, for decoders of Llama's shape.

Invariant: a setting that changes what the model computes is either honoured or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ModelConfig, RopeConfig

type Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor in the file, by its name."""

_REFUSED: Mapping[str, tuple[Any, str]] = {
    "expert_count": (0, "dense feed-forward layers"),
    "attention.sliding_window": (0, "attention over the whole context"),
    "rope.scaling.type": ("none", "no scaling of positions, or Llama 3's (tensor rope_freqs.weight)"),
    "rope.scale_linear": (1.0, "no scaling of positions, or Llama 3's (tensor rope_freqs.weight)"),
}
"""Key below the architecture, the only value it may have (or be left out), and what to say is supported."""

_END_OF_ANSWER = ("eos_token_id", "eot_token_id", "eom_token_id")
"""End of text, of a turn and of a message: chat models of several families end answers with the latter."""


def decoder_config(family: str, metadata: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    """The configuration that a file's metadata and the tensors it has describe.

    Raises:
        ValueError: a value is missing, malformed, or asks for what is not supported.
    """
    arch = metadata["general.architecture"]
    _refuse_unsupported(arch, metadata)
    heads = whole_number(metadata, f"{arch}.attention.head_count")
    hidden = whole_number(metadata, f"{arch}.embedding_length")
    head_dim = whole_number(metadata, f"{arch}.attention.key_length", hidden // heads)
    _check_head_dim(arch, metadata, head_dim)
    return ModelConfig(
        family=family,
        vocab_size=_vocab_size(shapes),
        hidden_size=hidden,
        num_layers=whole_number(metadata, f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=whole_number(metadata, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=whole_number(metadata, f"{arch}.feed_forward_length"),
        max_position_embeddings=whole_number(metadata, f"{arch}.context_length"),
        rms_norm_eps=float(metadata.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        rope=RopeConfig(float(metadata.get(f"{arch}.rope.freq_base", 10000.0))),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        eos_token_ids=_eos_token_ids(metadata),
    )


def whole_number(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive number; `default` where the key is missing."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "is missing" if value is None else f"={value!r} is not valid"
        raise ValueError(f"metadata {key} {found}: it has to be a whole number of at least 1, the same for all layers")
    return value


def _refuse_unsupported(arch: str, metadata: Mapping[str, Any]) -> None:
    for key, (accepted, supported) in _REFUSED.items():
        value = metadata.get(f"{arch}.{key}", accepted)
        if value != accepted:
            raise ValueError(f"metadata {arch}.{key}={value!r} is not supported: use a model with {supported}")


def _check_head_dim(arch: str, metadata: Mapping[str, Any], head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        value = metadata.get(f"{arch}.{key}", head_dim)
        if value != head_dim:
            raise ValueError(f"metadata {arch}.{key}={value!r} is not supported: it has to be the head's {head_dim}")


def _vocab_size(shapes: Shapes) -> int:
    if "token_embd.weight" not in shapes:
        raise ValueError("tensor 'token_embd.weight' is missing: give the file of a whole model")
    return shapes["token_embd.weight"][0]


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    given = (metadata.get(f"tokenizer.ggml.{key}") for key in _END_OF_ANSWER)
    return tuple(dict.fromkeys(token for token in given if token is not None))
