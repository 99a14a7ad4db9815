"""A tiny model to serve: random weights, a token for every byte, a chat template, and a longer context than the data's."""

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

DATA = Path(__file__).parent / "data" / "tiny" / "llama"
CONTEXT = 512
VOCAB = json.loads((DATA / "config.json").read_text())["vocab_size"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
FLAGS = ["--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--served-model-name", "tiny"]
"""Few shapes, as compiling them takes longest."""


def write_served_model(folder: Path) -> Path:
    """The model as a Hugging Face folder."""
    folder.mkdir(parents=True)
    config = json.loads((DATA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    shutil.copy(DATA / "model.safetensors", folder)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def _byte_tokenizer() -> tokenizers.Tokenizer:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend
