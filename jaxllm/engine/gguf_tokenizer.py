"""The tokenizer inside a GGUF file: byte-level BPE built from the file's metadata.

Invariant: text becomes the very tokens that the model's own tokenizer.json makes of it. A file whose way
of splitting text is not known is refused, since a wrong split gives worse answers and no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type for tokens that are matched in the text before it is split."""

_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True)
class _Splitting:
    """What tokenizer.ggml.pre stands for."""

    patterns: tuple[str, ...]
    """Applied one after the other: matches and what lies between them are pieces."""
    add_bos: bool = False
    """Where tokenizer.ggml.add_bos_token is missing."""
    ignore_merges: bool = False
    """A piece that is a token as a whole becomes that token, whatever the merges say."""
    nfc: bool = False
    """Text is brought into Unicode's composed form first."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _Splitting((_MODERN.format(numbers=r"\p{N}{1,3}"),), add_bos=True, ignore_merges=True)

_SPLITTINGS: Mapping[str, _Splitting] = {
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Splitting((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Splitting((_MODERN.format(numbers=r"\p{N}"),), nfc=True),
    "smollm": _Splitting((r"\p{N}", _GPT2)),
}


def gguf_backend(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a file's metadata describes.

    Raises:
        ValueError: the metadata has no tokenizer, or one of a kind that is not supported.
    """
    tokens = _tokens(metadata)
    splitting = _splitting(metadata)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=splitting.ignore_merges))
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(metadata, tokens))
    _add_framing(backend, metadata, splitting)
    return backend


def gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Text of the tokens with a role, by the names Hugging Face gives them ("bos_token")."""
    tokens = _tokens(metadata)
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL_TOKENS.items()}
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


def _splitting(metadata: Mapping[str, Any]) -> _Splitting:
    remedy = "name a folder with the model's tokenizer.json with tokenizer="
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"metadata tokenizer.ggml.model={model!r} is not supported ('gpt2' is): {remedy}")
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITTINGS:
        supported = ", ".join(_SPLITTINGS)
        raise ValueError(f"metadata tokenizer.ggml.pre={name!r} is not supported ({supported} are): {remedy}")
    return _SPLITTINGS[name]


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[AddedToken]:
    """Tokens that are matched as a whole. All are in the vocabulary, so they keep their ids."""
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    special = {index for index, kind in enumerate(kinds) if kind == _CONTROL}
    ends = (metadata.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id"))
    special |= {index for index in ends if index is not None and index < len(tokens)}
    plain = {index for index, kind in enumerate(kinds) if kind == _USER_DEFINED} - special
    return [AddedToken(tokens[index], special=index in special, normalized=False) for index in sorted(special | plain)]


def _add_framing(backend: Tokenizer, metadata: Mapping[str, Any], splitting: _Splitting) -> None:
    """Puts the begin and end tokens that the file asks for around a text."""
    special = gguf_special_tokens(metadata)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", splitting.add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [special["bos_token"]] if add_bos and "bos_token" in special else []
    after = [special["eos_token"]] if add_eos and "eos_token" in special else []
    if not before and not after:
        return
    framing = [(token, backend.token_to_id(token)) for token in dict.fromkeys(before + after)]
    single = [*before, "$A", *after]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=framing)
