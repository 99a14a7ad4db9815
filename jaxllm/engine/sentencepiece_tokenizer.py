"""The SentencePiece tokenizer inside a GGUF file ("llama"): pieces with scores, and a token per byte.

Gemma's, Llama 2's, Mistral's and Phi-3's files have one. Invariant: text becomes the very tokens that llama.cpp
makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from jaxllm.engine.tokenizer_merges import merges_of

DEFAULT_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Where a file does not say: those of Llama's first tokenizer."""

_NORMAL = 1
"""Value of tokenizer.ggml.token_type for pieces that text is put together of. All others are either matched as a
whole before, or stand for a byte, or are not used."""

_SPACE = "\u2581"


def sentencepiece_backend(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer without the tokens that are matched as a whole.

    Raises:
        ValueError: the tokens have no scores, or not all of them.
    """
    merges = merges_of(*_pieces(metadata, tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", DEFAULT_IDS["unknown_token_id"])
    unk_token = tokens[unknown] if unknown < len(tokens) else None
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        # Each text between two tokens that are matched as a whole gets its own space, as in llama.cpp.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        backend.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = replace
        backend.decoder = decoders.Sequence(decoding)
    return backend


def _pieces(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[list[str], list[float]]:
    """Pieces that text is put together of, and their scores."""
    scores = metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        found = f"has {len(scores)} values for {len(tokens)} tokens" if scores else "is missing"
        remedy = "name a folder with the model's tokenizer.json with tokenizer="
        raise ValueError(f"metadata tokenizer.ggml.scores {found}: {remedy}")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    normal = [index for index, kind in enumerate(kinds) if kind == _NORMAL]
    return [tokens[index] for index in normal], [scores[index] for index in normal]
