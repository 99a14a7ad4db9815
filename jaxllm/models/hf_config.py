"""Hugging Face config.json to `ModelConfig`.

Invariant: a setting that changes what the model computes is either honoured or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxllm.model_config import LayerKind, ModelConfig, RopeConfig
from jaxllm.models import hf_rope
from jaxllm.models.hf_rope import Fields, whole_number

StoredDType = Literal["float32", "bfloat16", "float16"]
Activation = Literal["silu", "gelu_tanh"]

_UNKNOWN: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "sliding_window": ((None,), "attention over the whole context"),
    "partial_rotary_factor": ((None, 1.0), "rotation of whole heads (1.0)"),
    "query_pre_attn_scalar": ((None,), "the usual scale of attention scores"),
    "attn_logit_softcapping": ((None,), "uncapped attention scores"),
    "final_logit_softcapping": ((None,), "uncapped logits"),
    "attention_bias": ((None, False), "attention without biases"),
    "mlp_bias": ((None, False), "feed-forward layers without biases"),
    "use_bidirectional_attention": ((None, False), "causal attention"),
    "quantization_config": ((None,), "unquantised weights, or a GGUF file of this model"),
}
"""Field, the values it may have in a family whose defaults do not name it, and what to say is supported."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def decoder_config(family: str, defaults: Fields, fields: Fields) -> ModelConfig:
    """The configuration that `fields`, the content of a config.json, describes.

    Args:
        family: name of the model's family.
        defaults: what transformers takes for fields that are left out. A field of `_UNKNOWN` has to be among
            them if the family knows it.
        fields: as they are in the file.

    Raises:
        ValueError: a field is missing, malformed, or asks for what is not supported.
    """
    refuse_unknown(defaults, fields)
    fields = {**defaults, **fields}
    heads = whole_number(fields, "num_attention_heads")
    hidden = whole_number(fields, "hidden_size")
    head_dim = whole_number(fields, "head_dim", hidden // heads)
    rope, local_rope = hf_rope.ropes(fields, head_dim)
    context = hf_rope.context_length(fields, rope)
    bias = bool(fields.get("attention_bias"))
    return ModelConfig(
        family=family,
        vocab_size=whole_number(fields, "vocab_size"),
        hidden_size=hidden,
        num_layers=whole_number(fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=whole_number(fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=whole_number(fields, "intermediate_size"),
        max_position_embeddings=context,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=rope,
        layers=_layers(fields, context, None if local_rope == rope else local_rope),
        activation=_activation(fields),
        attention_scale=_attention_scale(fields, head_dim),
        attention_soft_cap=fields.get("attn_logit_softcapping"),
        logit_soft_cap=fields.get("final_logit_softcapping"),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings")),
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bool(fields.get("mlp_bias")),
        dtype=_dtype(fields),
        eos_token_ids=_token_ids(fields, "eos_token_id"),
    )


def refuse_unknown(defaults: Fields, fields: Fields) -> None:
    """Raises ValueError for a field that the family does not know and that would change its model."""
    rope = fields.get("rope_parameters") or {}
    found = {"partial_rotary_factor": rope.get("partial_rotary_factor"), **fields}
    for name, (neutral, supported) in _UNKNOWN.items():
        unused = name == "sliding_window" and fields.get("use_sliding_window") is False
        if name not in defaults and not unused and found.get(name) not in neutral:
            raise ValueError(f"config.json: {name}={found[name]!r} is not supported: use a model with {supported}")


def _layers(fields: Fields, context: int, local_rope: RopeConfig | None) -> tuple[LayerKind, ...]:
    """The kind of each layer; none if all are plain."""
    sliding = _sliding(fields)
    window = None
    if any(sliding):
        window = whole_number(fields, "sliding_window")
    # A window that no context outgrows is none.
    local = LayerKind(window if window and window < context else None, local_rope)
    kinds = tuple(local if slides else LayerKind() for slides in sliding)
    return () if set(kinds) == {LayerKind()} else kinds


def _sliding(fields: Fields) -> list[bool]:
    """Which layers attend to a window only."""
    count = whole_number(fields, "num_hidden_layers")
    given = fields.get("layer_types")
    if given is not None:
        return _sliding_by_type(fields, given, count)
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return [False] * count
    if fields.get("max_window_layers") is not None:
        return [layer >= fields["max_window_layers"] for layer in range(count)]
    period = fields.get("sliding_window_pattern")  # of so many layers the last one sees all
    return [period is None or (layer + 1) % period != 0 for layer in range(count)]


def _sliding_by_type(fields: Fields, types: list[str], count: int) -> list[bool]:
    known = ["full_attention"] + ["sliding_attention"] * (fields.get("sliding_window") is not None)
    wrong = [kind for kind in types if kind not in known]
    if wrong:
        supported = " and ".join(map(repr, known))
        raise ValueError(f"config.json: layer_types has {wrong[0]!r}, but only {supported} can be used in this model")
    if len(types) != count:
        raise ValueError(f"config.json: layer_types names {len(types)} layers, num_hidden_layers={count}: correct one")
    return [kind == "sliding_attention" for kind in types]


def _activation(fields: Fields) -> Activation:
    name = "hidden_activation" if fields.get("hidden_activation") else "hidden_act"
    value = fields.get(name) or "silu"
    if value not in _ACTIVATIONS:
        supported = ", ".join(map(repr, _ACTIVATIONS))
        raise ValueError(f"config.json: {name}={value!r} is not supported: use a model with one of {supported}")
    return _ACTIVATIONS[value]


def _attention_scale(fields: Fields, head_dim: int) -> float | None:
    scalar = fields.get("query_pre_attn_scalar")
    return None if scalar in (None, head_dim) else float(scalar) ** -0.5


def _dtype(fields: Fields) -> StoredDType:
    value = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    for dtype in get_args(StoredDType):
        if value == dtype:
            return dtype
    raise ValueError(f"config.json: dtype={value!r} is not supported: {', '.join(get_args(StoredDType))} are")


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.get(name)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{name}={value!r} is not valid: it has to be a token id or a list of token ids")
    return ids
