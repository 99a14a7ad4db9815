"""The bytes a token stands for, which need not be whole characters.

The invariant: the bytes of an answer's tokens, one after the other, are its text.
"""

from __future__ import annotations

from functools import cache

from tokenizers import decoders

from jaxllm.engine.detokenizer import BYTE_TOKEN
from jaxllm.engine.tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> bytes:
    """Bytes of a token, whose text is `text` where it is one of whole characters."""
    written = tokenizer.id_to_token(token_id)
    if written is None or token_id in tokenizer.special_ids:
        return text.encode()
    if match := BYTE_TOKEN.fullmatch(written):
        return bytes([int(match[1], 16)])
    if isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
        values = _byte_of_char()
        if all(char in values for char in written):
            return bytes(values[char] for char in written)
    return text.encode()


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: bytes that are no printable character are written with characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}
