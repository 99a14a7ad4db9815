"""Shapes of well-known models, so that their speed can be measured without any file.

Invariant: an entry is what the model's own config.json says, without its end-of-sequence tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

type Shape = Mapping[str, Any]

_LLAMA_3_1: Shape = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

SHAPES: Mapping[str, Shape] = {
    "llama-3.1-8b": {
        **_LLAMA_3_1,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "llama-3.1-70b": {
        **_LLAMA_3_1,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float32",
        "vocab_size": 512,
    },
}
"""Content of config.json by the shape's name; "tiny-llama" is no one's: it runs anywhere in seconds."""
