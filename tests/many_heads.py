"""A model whose 18 query and 6 K/V heads divide among many numbers of devices, and do not among others."""

from jaxllm.model_config import ModelConfig

MODEL = ModelConfig(
    family="llama",
    vocab_size=60,
    hidden_size=32,
    num_layers=2,
    num_heads=18,
    num_kv_heads=6,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=64,
)
