"""Makes tests/data/tiny: a random checkpoint for each model family, and the logits transformers computes with it.

    python3.11 -m venv ENV && ENV/bin/pip install torch transformers   # torch for CPUs is enough
    ENV/bin/python scripts/make_tiny_checkpoints.py [NAME ...]

Made with Python 3.11, torch 2.13 and transformers 5.24. Each folder has config.json, model.safetensors (float32)
and expected.npz: the prompt's `token_ids` and the `logits` of all its positions. A variant differs from another
checkpoint in its configuration only and has no weights of its own: weights_of.txt names that checkpoint.

All numbers come from seeds. Norms, biases and caps are far from doing nothing, so that leaving one out shows.
"""

import argparse
import dataclasses
import importlib
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Of an environment of its own, not of this project's.
torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "data" / "tiny"
PROMPT_LENGTH, VOCAB = 48, 256

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GEMMA = {
    **SMALL,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "query_pre_attn_scalar": 10,
    "tie_word_embeddings": True,
}
LONG, SHORT = [1.0, 1.5, 4.0], [1.0, 1.1, 1.3]


@dataclass(frozen=True)
class Tiny:
    """One checkpoint."""

    name: str
    config: str
    """Name of its configuration class."""
    fields: dict[str, Any] = field(default_factory=dict)
    weights_of: str = ""
    """Another checkpoint that it takes its weights from."""
    offset: float = 1.0
    """What norms' weights lie around."""


LLAMA = Tiny("llama", "LlamaConfig", {**SMALL, "head_dim": 16, "attention_bias": True, "mlp_bias": True})
PHI3 = Tiny("phi3", "Phi3Config", {**SMALL, "sliding_window": 12, "original_max_position_embeddings": 128})


def variant(of: Tiny, name: str, **fields: Any) -> Tiny:
    """The same weights under another configuration."""
    return dataclasses.replace(of, name=f"{of.name}-{name}", weights_of=of.name, fields={**of.fields, **fields})


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


def longrope(**fields: Any) -> dict[str, Any]:
    # 6 of 8 dimensions of a head are rotated.
    return rope("longrope", long_factor=LONG, short_factor=SHORT, partial_rotary_factor=0.75, **fields)


CHECKPOINTS = [
    LLAMA,
    variant(LLAMA, "linear", rope_parameters=rope("linear", factor=4.0)),
    variant(
        LLAMA,
        "llama3",
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    variant(LLAMA, "yarn", rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    Tiny("mistral", "MistralConfig", {**SMALL, "head_dim": 12, "sliding_window": 8}),
    Tiny(
        "qwen2",
        "Qwen2Config",
        {**SMALL, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2},
    ),
    Tiny("qwen3", "Qwen3Config", {**SMALL, "head_dim": 16, "tie_word_embeddings": True}),
    Tiny(
        "gemma2", "Gemma2Config", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, offset=0.0
    ),
    Tiny(
        "gemma3",
        "Gemma3TextConfig",
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": rope("linear", factor=8.0) | {"rope_theta": 1000000.0},
                "sliding_attention": rope("default"),
            },
        },
        offset=0.0,
    ),
    PHI3,
    variant(PHI3, "longrope", rope_parameters=longrope(), original_max_position_embeddings=32),
    variant(PHI3, "longrope-short", rope_parameters=longrope(), original_max_position_embeddings=64),
    Tiny("olmo2", "Olmo2Config", SMALL),
    Tiny(
        "olmo3",
        "Olmo3Config",
        {
            **SMALL,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=32),
                "sliding_attention": rope("default"),
            },
        },
    ),
]


def fill(model: Any, offset: float) -> None:
    """Gives every parameter random values, from a seed."""
    rng = np.random.default_rng(0)
    for name, parameter in sorted(model.named_parameters()):
        shape = tuple(parameter.shape)
        if "norm" in name:
            values = offset + rng.uniform(-0.5, 0.5, shape)
        elif name.endswith("bias"):
            values = rng.normal(0, 0.5, shape)
        else:
            values = rng.normal(0, 1.5 / math.sqrt(shape[1]), shape)
        parameter.data = torch.tensor(values, dtype=torch.float32)


def make(tiny: Tiny) -> None:
    """Writes one folder."""
    folder = FOLDER / tiny.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = getattr(transformers, tiny.config)(**tiny.fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    fill(model, tiny.offset)
    token_ids = np.random.default_rng(1).integers(3, VOCAB, PROMPT_LENGTH)
    with torch.no_grad():
        logits = model(torch.tensor(token_ids)[None]).logits[0].numpy()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "expected.npz", token_ids=token_ids.astype(np.int32), logits=logits)
    if tiny.weights_of:
        (folder / "model.safetensors").unlink()
        (folder / "weights_of.txt").write_text(tiny.weights_of + "\n")
    print(f"{tiny.name:20} {sum(file.stat().st_size for file in folder.iterdir()) / 1024:6.0f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="checkpoints to make (default: all)")
    names = parser.parse_args().names
    for tiny in CHECKPOINTS:
        if not names or tiny.name in names:
            make(tiny)


if __name__ == "__main__":
    main()
