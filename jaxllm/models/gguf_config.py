"""GGUF metadata to `ModelConfig`.

Invariant: a setting that changes what the model computes is either honoured or refused, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.model_config import LayerKind, ModelConfig, RopeConfig
from jaxllm.models.hf_rope import yarn_magnitude

type Metadata = Mapping[str, Any]
type Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor in the file, by its name."""

_UNKNOWN: Mapping[str, tuple[Any, str]] = {
    "expert_count": (0, "dense feed-forward layers"),
    "attention.sliding_window": (0, "attention over the whole context"),
    "attn_logit_softcapping": (0.0, "uncapped attention scores"),
    "final_logit_softcapping": (0.0, "uncapped logits"),
    "rope.scale_linear": (1.0, "positions scaled by rope.scaling.factor, or not at all"),
    "rope.scaling.yarn_ext_factor": (1.0, "plain yarn"),
    "rope.scaling.yarn_attn_factor": (1.0, "plain yarn"),
    "rope.scaling.yarn_log_multiplier": (0.0, "plain yarn"),
}
"""Key below the architecture, the only value it may have in a family whose defaults do not name it, and what
to say is supported."""

_END_OF_ANSWER = ("eos_token_id", "eot_token_id", "eom_token_id")
"""End of text, of a turn and of a message: chat models of several families end answers with the latter."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def decoder_config(family: str, defaults: Metadata, metadata: Metadata, shapes: Shapes) -> ModelConfig:
    """The configuration that a file's metadata and the tensors it has describe.

    Args:
        family: name of the model's family.
        defaults: what llama.cpp takes for keys that are left out, by their names below the architecture. A key
            of `_UNKNOWN` has to be among them if the family knows it.
        metadata: as it is in the file.
        shapes: of all tensors in the file.

    Raises:
        ValueError: a value is missing, malformed, or asks for what is not supported.
    """
    arch = metadata["general.architecture"]
    _refuse_unknown(arch, defaults, metadata)
    metadata = {f"{arch}.{key}": value for key, value in defaults.items()} | dict(metadata)
    heads = whole_number(metadata, f"{arch}.attention.head_count")
    hidden = whole_number(metadata, f"{arch}.embedding_length")
    head_dim = whole_number(metadata, f"{arch}.attention.key_length", hidden // heads)
    _check_head_dim(arch, metadata, head_dim, "rope.dimension_count" in defaults)
    rope = _rope(arch, metadata, head_dim)
    if SHORT_FACTORS in shapes:
        original = whole_number(metadata, f"{arch}.rope.scaling.original_context_length")
        rope = dataclasses.replace(rope, original_max_position=original)
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
        rope=rope,
        layers=_layers(arch, metadata, rope),
        attention_soft_cap=metadata.get(f"{arch}.attn_logit_softcapping") or None,
        logit_soft_cap=metadata.get(f"{arch}.final_logit_softcapping") or None,
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        attention_out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        eos_token_ids=_eos_token_ids(metadata),
    )


def with_rope_tensors(config: ModelConfig, shapes: Shapes, read: Callable[[str], np.ndarray]) -> ModelConfig:
    """The configuration completed by the factors of frequencies that are among the tensors.

    Args:
        config: what `decoder_config` returned.
        shapes: of all tensors in the file.
        read: gives a tensor by its name.
    """
    factors, short = (
        tuple(read(name).tolist()) if name in shapes else ()
        for name in (LONG_FACTORS if LONG_FACTORS in shapes else "rope_freqs.weight", SHORT_FACTORS)
    )
    rope = dataclasses.replace(config.rope, freq_factors=factors, short_freq_factors=short)
    return dataclasses.replace(config, rope=rope)


def whole_number(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A positive number; `default` where the key is missing."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "is missing" if value is None else f"={value!r} is not valid"
        raise ValueError(f"metadata {key} {found}: it has to be a whole number of at least 1, the same for all layers")
    return value


def _refuse_unknown(arch: str, defaults: Metadata, metadata: Metadata) -> None:
    for key, (accepted, supported) in _UNKNOWN.items():
        value = metadata.get(f"{arch}.{key}", accepted)
        if key not in defaults and value != accepted:
            raise ValueError(f"metadata {arch}.{key}={value!r} is not supported: use a model with {supported}")


def _check_head_dim(arch: str, metadata: Metadata, head_dim: int, may_rotate_less: bool) -> None:
    for key in ("attention.value_length", *([] if may_rotate_less else ["rope.dimension_count"])):
        value = metadata.get(f"{arch}.{key}", head_dim)
        if value != head_dim:
            raise ValueError(f"metadata {arch}.{key}={value!r} is not supported: it has to be the head's {head_dim}")


def _rope(arch: str, metadata: Metadata, head_dim: int) -> RopeConfig:
    prefix = f"{arch}.rope"
    rotary_dim = metadata.get(f"{prefix}.dimension_count") or head_dim
    plain = RopeConfig(
        float(metadata.get(f"{prefix}.freq_base", 10000.0)),
        attention_factor=float(metadata.get(f"{prefix}.scaling.attn_factor", 1.0)),
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
    )
    kind, factor = metadata.get(f"{prefix}.scaling.type", "none"), metadata.get(f"{prefix}.scaling.factor", 1.0)
    if kind == "yarn":
        return _yarn(plain, prefix, metadata, float(factor))
    if kind == "linear":
        return dataclasses.replace(plain, scaling="linear", factor=float(factor))
    if kind not in ("none", "longrope"):  # the latter's factors are tensors
        supported = "'none', 'linear', 'yarn', 'longrope'"
        raise ValueError(f"metadata {prefix}.scaling.type={kind!r} is not supported: use a model with {supported}")
    return plain


def _yarn(plain: RopeConfig, prefix: str, metadata: Metadata, factor: float) -> RopeConfig:
    return dataclasses.replace(
        plain,
        scaling="yarn",
        factor=factor,
        low_freq_factor=float(metadata.get(f"{prefix}.scaling.yarn_beta_slow", 1.0)),
        high_freq_factor=float(metadata.get(f"{prefix}.scaling.yarn_beta_fast", 32.0)),
        original_max_position=whole_number(metadata, f"{prefix}.scaling.original_context_length"),
        attention_factor=plain.attention_factor * yarn_magnitude(factor),
    )


def _layers(arch: str, metadata: Metadata, rope: RopeConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer; none if all are plain."""
    window = metadata.get(f"{arch}.attention.sliding_window") or 0
    if not window:
        return ()
    count = whole_number(metadata, f"{arch}.block_count")
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, int | None):  # of so many layers the last one sees all
        pattern = [not pattern or (layer + 1) % pattern != 0 for layer in range(count)]
    context = whole_number(metadata, f"{arch}.context_length")
    # A window that no context outgrows is none.
    local = LayerKind(window if window < context else None, _local_rope(arch, metadata, rope))
    kinds = tuple(local if slides else LayerKind() for slides in pattern)
    return () if set(kinds) == {LayerKind()} else kinds


def _local_rope(arch: str, metadata: Metadata, rope: RopeConfig) -> RopeConfig | None:
    """The embedding of layers with a window, where it is one of their own: never scaled."""
    key = f"{arch}.rope.freq_base_swa"
    if key not in metadata:
        return None
    local = RopeConfig(float(metadata[key] or rope.theta), rotary_dim=rope.rotary_dim)
    return None if local == rope else local


def _vocab_size(shapes: Shapes) -> int:
    if "token_embd.weight" not in shapes:
        raise ValueError("tensor 'token_embd.weight' is missing: give the file of a whole model")
    return shapes["token_embd.weight"][0]


def _eos_token_ids(metadata: Metadata) -> tuple[int, ...]:
    given = (metadata.get(f"tokenizer.ggml.{key}") for key in _END_OF_ANSWER)
    return tuple(dict.fromkeys(token for token in given if token is not None))
