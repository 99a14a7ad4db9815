"""Position embeddings of a Hugging Face config.json, in its old spelling (rope_scaling) and its new one.

transformers 5 writes rope_parameters, with rope_theta inside and, where layers differ, one for each kind
of layer; earlier ones rope_theta, rope_scaling and rope_local_base_freq.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.model_config import RopeConfig

type Fields = Mapping[str, Any]


def ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The embeddings of layers that see everything and of layers that see a window.

    Raises:
        ValueError: a field is missing, malformed, or asks for what is not supported.
    """
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = fields.get("rope_local_base_freq")
    local = None if theta is None else {"rope_theta": theta}
    if "full_attention" in given:
        local = {**(local or {}), **(given.get("sliding_attention") or {})}
        given = given["full_attention"] or {}
    whole = _rope(fields, given, head_dim)
    return whole, whole if local is None else _rope(fields, local, head_dim)


def context_length(fields: Fields, rope: RopeConfig) -> int:
    """Longest context of the model. Files that ask for yarn often leave the original length where it was."""
    length = whole_number(fields, "max_position_embeddings", 2048)
    extended = int(rope.original_max_position * rope.factor) if rope.scaling == "yarn" else 0
    return max(length, extended)


def whole_number(fields: Fields, name: str, default: int | None = None) -> int:
    """A positive number; `default` where the field is missing or null."""
    value = default if fields.get(name) is None else fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "is missing" if value is None else f"={value!r} is not valid"
        raise ValueError(f"config.json: {name} {found}: it has to be a whole number of at least 1")
    return value


def _rope(fields: Fields, given: Fields, head_dim: int) -> RopeConfig:
    theta = float(given.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    share = given.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    plain = RopeConfig(theta, rotary_dim=None if share == 1.0 else int(head_dim * share))
    kind = given.get("rope_type", given.get("type", "default"))
    if "short_factor" in given:
        kind = "longrope"  # early Phi-3 files call it "su" or "yarn"
    if kind not in _SCALINGS:
        supported = ", ".join(map(repr, _SCALINGS))
        reason = " (keys already cached would have to be rotated again)" if kind == "dynamic" else ""
        raise ValueError(f"config.json: rope type {kind!r} is not supported{reason}: {supported} are")
    rope = _SCALINGS[kind](plain, fields, given)
    _check_factors(rope, (rope.rotary_dim or head_dim) // 2)
    return rope


def _linear(plain: RopeConfig, fields: Fields, given: Fields) -> RopeConfig:
    return dataclasses.replace(plain, scaling="linear", factor=_number(given, "factor"))


def _llama3(plain: RopeConfig, fields: Fields, given: Fields) -> RopeConfig:
    return dataclasses.replace(
        plain,
        scaling="llama3",
        factor=_number(given, "factor"),
        low_freq_factor=_number(given, "low_freq_factor"),
        high_freq_factor=_number(given, "high_freq_factor"),
        original_max_position=_original_length(fields, given),
    )


def _yarn(plain: RopeConfig, fields: Fields, given: Fields) -> RopeConfig:
    factor = _number(given, "factor")
    return dataclasses.replace(
        plain,
        scaling="yarn",
        factor=factor,
        low_freq_factor=float(given.get("beta_slow") or 1),
        high_freq_factor=float(given.get("beta_fast") or 32),
        original_max_position=_original_length(fields, given),
        attention_factor=_yarn_attention_factor(factor, given),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention_factor(factor: float, given: Fields) -> float:
    if given.get("attention_factor") is not None:
        return _number(given, "attention_factor")
    over, under = given.get("mscale"), given.get("mscale_all_dim")
    if over and under:
        return yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
    return yarn_magnitude(factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What yarn recommends to multiply cosines and sines by."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(plain: RopeConfig, fields: Fields, given: Fields) -> RopeConfig:
    """Long factors, and short ones for contexts within the original length.

    transformers looks at the longest position of each call, and so uses keys of one kind with queries of the
    other in a text that outgrows the original length. Here, as in vLLM and llama.cpp, the longest context
    allowed decides for all (`ModelConfig.for_context`): texts are computed the same whatever their length.
    """
    original = _original_length(fields, given)
    factor = given.get("factor") or whole_number(fields, "max_position_embeddings", original) / original
    attention = given.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return dataclasses.replace(
        plain,
        freq_factors=_factors(given, "long_factor"),
        short_freq_factors=_factors(given, "short_factor"),
        original_max_position=original,
        attention_factor=float(attention),
    )


_SCALINGS: Mapping[str, Callable[[RopeConfig, Fields, Fields], RopeConfig]] = {
    "default": lambda plain, fields, given: plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""By rope_type; takes the unscaled embedding, all fields, and those of the embedding."""


def _original_length(fields: Fields, given: Fields) -> int:
    name = "original_max_position_embeddings"
    # Phi-3 has it beside the other fields, and transformers prefers that.
    given = {name: fields.get(name) or given.get(name)}
    return whole_number(given, name, fields.get("max_position_embeddings"))


def _number(given: Fields, name: str) -> float:
    if not isinstance(given.get(name), int | float):
        kind = given.get("rope_type", given.get("type"))
        raise ValueError(f"config.json: rope type {kind!r} needs a number {name}, not {given.get(name)!r}")
    return float(given[name])


def _check_factors(rope: RopeConfig, num_pairs: int) -> None:
    for factors in (rope.freq_factors, rope.short_freq_factors):
        if factors and len(factors) != num_pairs:
            raise ValueError(
                f"config.json: rope type 'longrope' has {len(factors)} factors for {num_pairs} rotated pairs of "
                "dimensions: correct long_factor, short_factor or partial_rotary_factor"
            )


def _factors(given: Fields, name: str) -> tuple[float, ...]:
    value = given.get(name)
    if not isinstance(value, list) or not all(isinstance(factor, int | float) for factor in value):
        raise ValueError(f"config.json: rope type 'longrope' needs a list of numbers {name}, not {value!r}")
    return tuple(map(float, value))
