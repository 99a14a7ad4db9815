"""Small tokenizers of the kinds that models have, so that tests can draw token ids with every awkward property.

Everything in them is real, but for the vocabulary.
"""

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxllm.engine.tokenizer import Tokenizer


def get_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None, token
    return token_id


BYTE_CHARS = pre_tokenizers.ByteLevel.alphabet()


def _visible(data: bytes) -> str:
    """A byte string as byte-level vocabularies write it."""
    return "".join(_VISIBLE[byte] for byte in data)


def _make_visible() -> dict[int, str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}


_VISIBLE = _make_visible()
assert sorted(_VISIBLE.values()) == sorted(BYTE_CHARS)


def byte_level(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """GPT-2's kind: all bytes, and merges of which some end or begin inside a character."""
    vocab = {_VISIBLE[byte]: byte for byte in range(256)}
    merges = []
    for left, right in [
        (b"h", b"e"),
        (b"l", b"l"),
        (b" ", b"w"),
        ("你".encode()[:1], "你".encode()[1:2]),
        ("你".encode()[2:], b"!"),
        ("é".encode()[:1], "é".encode()[1:]),
        (b" ", "🙂".encode()[:1]),
        ("🙂".encode()[1:2], "🙂".encode()[2:3]),
        (b"\xff", b"\xff"),
    ]:
        merges.append((_visible(left), _visible(right)))
        vocab[_visible(left + right)] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    return _with_added_tokens(backend)


PIECES = ["▁", "a", "b", "c", "▁a", "▁b", "▁▁", "▁bc", "hello", "▁hello", "你", "▁你", "é", "\n", ".", "\ufffd"]


def byte_fallback(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """Llama 2's kind: SentencePiece's pieces, with a token per byte for what the vocabulary lacks."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoder or llama_decoder()
    return _with_added_tokens(backend)


def words(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """BERT's kind: words, with a space put between tokens when they are decoded, or none before those with ##."""
    tokens = ["[UNK]", "a", "b", "hello", "##c", "##hello", ".", "n't", "你"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    return _with_added_tokens(backend)


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def gemma_decoder() -> decoders.Decoder:
    """As Llama's, but the first space of a text is kept."""
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _with_added_tokens(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend)
