"""The tokenizer inside a GGUF file, built from the file's metadata.

Invariant: text becomes the very tokens that the model was trained on. A file of a kind that is not known is
refused, since wrong tokens give worse answers and no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from jaxllm.engine.bytelevel_tokenizer import bytelevel_backend, splitting_of
from jaxllm.engine.sentencepiece_tokenizer import DEFAULT_IDS, sentencepiece_backend

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
"""Values of tokenizer.ggml.model."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type for tokens that are matched in the text before it is split."""

_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens that are special whatever their type."""

_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def gguf_backend(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a file's metadata describes.

    Raises:
        ValueError: the metadata has no tokenizer, or one of a kind that is not supported.
    """
    tokens = _tokens(metadata)
    if _kind(metadata) == _BYTE_LEVEL:
        backend = bytelevel_backend(metadata, tokens)
        add_bos = splitting_of(metadata).add_bos
    else:
        backend = sentencepiece_backend(metadata, tokens)
        add_bos = True
    backend.add_tokens(_added_tokens(metadata, tokens))
    _add_framing(backend, metadata, add_bos)
    return backend


def gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Text of the tokens with a role, by the names Hugging Face gives them ("bos_token")."""
    tokens = _tokens(metadata)
    defaults = DEFAULT_IDS if _kind(metadata) == _SENTENCEPIECE else {}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}", defaults.get(key)) for name, key in _SPECIAL_TOKENS.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}


def gguf_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; empty if the file has none."""
    key = "tokenizer.chat_template"
    named = {name: metadata.get(f"{key}.{name}") for name in metadata.get("tokenizer.chat_templates", ())}
    templates = {"default": metadata.get(key), **named}
    return {name: template for name, template in templates.items() if template is not None}


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError("metadata tokenizer.ggml.tokens is missing: name a tokenizer folder with tokenizer=")
    return metadata["tokenizer.ggml.tokens"]


def _kind(metadata: Mapping[str, Any]) -> str:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        supported = f"{_BYTE_LEVEL!r} and {_SENTENCEPIECE!r} are"
        remedy = "name a folder with the model's tokenizer.json with tokenizer="
        raise ValueError(f"metadata tokenizer.ggml.model={kind!r} is not supported ({supported}): {remedy}")
    return kind


def _added_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[AddedToken]:
    """Tokens that are matched as a whole. All are in the vocabulary, so they keep their ids."""
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    special = {index for index, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL)}
    ends = (metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS)
    special |= {index for index in ends if index is not None and index < len(tokens)}
    plain = {index for index, kind in enumerate(kinds) if kind == _USER_DEFINED} - special
    # Files do not say that Phi-3's own tokens take the whitespace after them.
    is_phi3 = metadata.get("general.architecture") == "phi3" and _kind(metadata) == _SENTENCEPIECE
    takes_space = {index for index in special | plain if is_phi3 and tokens[index] not in _PHI3_KEEPS_SPACE}
    return [
        AddedToken(tokens[index], special=index in special, normalized=False, rstrip=index in takes_space)
        for index in sorted(special | plain)
    ]


def _add_framing(backend: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    """Puts the begin and end tokens that the file asks for around a text; `add_bos` where it does not say."""
    special = gguf_special_tokens(metadata)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [special["bos_token"]] if add_bos and "bos_token" in special else []
    after = [special["eos_token"]] if add_eos and "eos_token" in special else []
    if not before and not after:
        return
    framing = [(token, backend.token_to_id(token)) for token in dict.fromkeys(before + after)]
    single = [*before, "$A", *after]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=framing)
