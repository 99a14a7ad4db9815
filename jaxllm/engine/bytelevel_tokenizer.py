"""The byte-level BPE tokenizer inside a GGUF file ("gpt2"): merges, and a name for the way text is split first.

Invariant: text becomes the very tokens that the model's own tokenizer.json makes of it. A file whose way
of splitting text is not known is refused, since a wrong split gives worse answers and no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers


@dataclass(frozen=True)
class Splitting:
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
_BY_CASE = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{contraction}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{contraction}"
    r"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS = r"\p{N}{1,3}"
_CL100K = (_MODERN.format(numbers=_THREE_DIGITS),)
_LLAMA3 = Splitting(_CL100K, add_bos=True, ignore_merges=True)

SPLITTINGS: Mapping[str, Splitting] = {
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Splitting((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": Splitting(_CL100K),
    "dbrx": Splitting(_CL100K),  # OLMo 2's and Phi-4's: both took GPT-4's tokenizer
    "gpt-4o": Splitting(  # Phi-4 mini's
        (_BY_CASE.format(contraction="(?i:'s|'t|'re|'ve|'m|'ll|'d)?", numbers=_THREE_DIGITS),)
    ),
    "qwen2": Splitting((_MODERN.format(numbers=r"\p{N}"),), nfc=True),
    "smollm": Splitting((r"\p{N}", _GPT2)),
    "tekken": Splitting((_BY_CASE.format(contraction="", numbers=r"\p{N}"),), add_bos=True, ignore_merges=True),
}


def bytelevel_backend(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer without the tokens that are matched as a whole.

    Raises:
        ValueError: the way of splitting text is not supported.
    """
    splitting = splitting_of(metadata)
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
    return backend


def splitting_of(metadata: Mapping[str, Any]) -> Splitting:
    """What the file's name for its way of splitting text stands for.

    Raises:
        ValueError: it is not supported.
    """
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITTINGS:
        remedy = "name a folder with the model's tokenizer.json with tokenizer="
        raise ValueError(
            f"metadata tokenizer.ggml.pre={name!r} is not supported ({', '.join(SPLITTINGS)} are): {remedy}"
        )
    return SPLITTINGS[name]
