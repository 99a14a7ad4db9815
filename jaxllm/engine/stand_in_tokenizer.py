"""A tokenizer for models that have none: every byte is a token, and every id of the vocabulary can be shown.

Invariant: text comes back as it was; no token is special, so nothing is added to a prompt and nothing ends an answer.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.engine.tokenizer import Tokenizer, load_tokenizer
from jaxllm.model_config import ModelConfig

NUM_BYTES = 256

CHAT_TEMPLATE = """\
{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def open_tokenizer(path: Path | None, model: ModelConfig) -> Tokenizer:
    """The tokenizer of a GGUF file or a Hugging Face folder, or the stand-in where there is none.

    Raises:
        ValueError: it is broken or not supported, or the vocabulary is too small for the stand-in.
    """
    return load_tokenizer(path) if path else stand_in_tokenizer(model.vocab_size)


def stand_in_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids 0 to 255 are the bytes; any other id reads as " <id>", and no text becomes it.

    Raises:
        ValueError: the vocabulary is too small for the bytes.
    """
    if vocab_size < NUM_BYTES:
        raise ValueError(
            f"the model has no tokenizer, and its vocabulary of {vocab_size} is too small for one of {NUM_BYTES} bytes: "
            "name a tokenizer with tokenizer="
        )
    written = _written_bytes()
    vocab = {character: byte for byte, character in enumerate(written)}
    space = written[ord(" ")]
    vocab |= {f"{space}<{index}>": index for index in range(NUM_BYTES, vocab_size)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_templates={"default": CHAT_TEMPLATE})


def _written_bytes() -> list[str]:
    """How byte-level vocabularies write each byte: as its own character if that can be seen, else as one above 255."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in visible else next(others)) for byte in range(NUM_BYTES)]
