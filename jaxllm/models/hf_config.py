"""Hugging Face config.json to `ModelConfig`, for decoders of Llama's shape.

Invariant: a setting that changes what the model computes is either honoured or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxllm.config import ModelConfig, RopeConfig

StoredDType = Literal["float32", "bfloat16", "float16"]

_REFUSED: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "'silu'"),
    "sliding_window": (None, "attention over the whole context"),
    "partial_rotary_factor": (1.0, "rotation of whole heads (1.0)"),
    "quantization_config": (None, "unquantised weights, or a GGUF file of this model"),
}
"""Field, the only value it may have (a field that is left out has it), and what to say is supported."""


def decoder_config(family: str, fields: Mapping[str, Any]) -> ModelConfig:
    """The configuration that `fields`, the content of a config.json, describes.

    Raises:
        ValueError: a field is missing, malformed, or asks for what is not supported.
    """
    _refuse_unsupported(fields)
    heads = whole_number(fields, "num_attention_heads")
    hidden = whole_number(fields, "hidden_size")
    return ModelConfig(
        family=family,
        vocab_size=whole_number(fields, "vocab_size"),
        hidden_size=hidden,
        num_layers=whole_number(fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=whole_number(fields, "num_key_value_heads", heads),
        head_dim=whole_number(fields, "head_dim", hidden // heads),
        intermediate_size=whole_number(fields, "intermediate_size"),
        max_position_embeddings=whole_number(fields, "max_position_embeddings", 2048),
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(fields),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=bool(fields.get("mlp_bias", False)),
        dtype=_dtype(fields),
        eos_token_ids=_token_ids(fields, "eos_token_id"),
    )


def whole_number(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive number; `default` where the field is missing or null."""
    value = default if fields.get(name) is None else fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "is missing" if value is None else f"={value!r} is not valid"
        raise ValueError(f"config.json: {name} {found}: it has to be a whole number of at least 1")
    return value


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, (accepted, supported) in _REFUSED.items():
        unused = name == "sliding_window" and fields.get("use_sliding_window") is False
        if not unused and fields.get(name) not in (None, accepted):
            raise ValueError(f"config.json: {name}={fields[name]!r} is not supported: use a model with {supported}")
    for kind in fields.get("layer_types") or ():
        if kind != "full_attention":
            raise ValueError(f"config.json: layer_types has {kind!r}, but only 'full_attention' is supported")


def _rope(fields: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters with rope_theta inside; earlier ones rope_scaling and rope_theta.
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(given.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    _refuse_unsupported({"partial_rotary_factor": given.get("partial_rotary_factor")})
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} is not supported: 'default' and 'llama3' are")
    return RopeConfig(
        theta,
        "llama3",
        factor=_rope_number(given, "factor"),
        low_freq_factor=_rope_number(given, "low_freq_factor"),
        high_freq_factor=_rope_number(given, "high_freq_factor"),
        original_max_position=whole_number(
            given, "original_max_position_embeddings", fields.get("max_position_embeddings")
        ),
    )


def _rope_number(given: Mapping[str, Any], name: str) -> float:
    if not isinstance(given.get(name), int | float):
        raise ValueError(f"config.json: rope type 'llama3' needs a number {name}, not {given.get(name)!r}")
    return float(given[name])


def _dtype(fields: Mapping[str, Any]) -> StoredDType:
    value = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    for dtype in get_args(StoredDType):
        if value == dtype:
            return dtype
    raise ValueError(f"config.json: dtype={value!r} is not supported: {', '.join(get_args(StoredDType))} are")


def _token_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = fields.get(name)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{name}={value!r} is not valid: it has to be a token id or a list of token ids")
    return ids
