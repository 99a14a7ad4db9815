"""Tiny Llama checkpoints, written to disk in both file formats with the same numbers."""

import json

import gguf
import numpy as np
import safetensors.numpy
from gguf import GGMLQuantizationType, GGUFWriter

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 32, 6, 3, 16, 64, 24, 2

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
LAYER_TENSORS = {
    "input_layernorm.weight": ("attn_norm.weight", (HIDDEN,)),
    "self_attn.q_proj.weight": ("attn_q.weight", (HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.k_proj.weight": ("attn_k.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.v_proj.weight": ("attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.q_proj.bias": ("attn_q.bias", (HEADS * HEAD_DIM,)),
    "self_attn.k_proj.bias": ("attn_k.bias", (KV_HEADS * HEAD_DIM,)),
    "self_attn.v_proj.bias": ("attn_v.bias", (KV_HEADS * HEAD_DIM,)),
    "self_attn.o_proj.weight": ("attn_output.weight", (HIDDEN, HEADS * HEAD_DIM)),
    "post_attention_layernorm.weight": ("ffn_norm.weight", (HIDDEN,)),
    "mlp.gate_proj.weight": ("ffn_gate.weight", (INTERMEDIATE, HIDDEN)),
    "mlp.up_proj.weight": ("ffn_up.weight", (INTERMEDIATE, HIDDEN)),
    "mlp.down_proj.weight": ("ffn_down.weight", (HIDDEN, INTERMEDIATE)),
}
TENSORS = {
    "model.embed_tokens.weight": ("token_embd.weight", (VOCAB, HIDDEN)),
    "model.norm.weight": ("output_norm.weight", (HIDDEN,)),
    "lm_head.weight": ("output.weight", (VOCAB, HIDDEN)),
} | {
    f"model.layers.{i}.{name}": (f"blk.{i}.{gguf_name}", shape)
    for i in range(LAYERS)
    for name, (gguf_name, shape) in LAYER_TENSORS.items()
}
"""Tensors of the tiny model: Hugging Face's name to GGUF's and the shape."""


def make_weights(dtype=np.float32):
    """Random tensors by Hugging Face's names."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, (_, shape) in TENSORS.items()}


def write_folder(path, weights, shards=1, config=CONFIG):
    """A Hugging Face folder with its tensors in one file or in several."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        safetensors.numpy.save_file(weights, path / "model.safetensors")
        return path
    names = sorted(weights)
    files = [f"model-{k + 1:05}-of-{shards:05}.safetensors" for k in range(shards)]
    for k, file in enumerate(files):
        safetensors.numpy.save_file({name: weights[name] for name in names[k::shards]}, path / file)
    index = {"weight_map": {name: files[k % shards] for k, name in enumerate(names)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def permute(rows, heads):
    """What llama.cpp's converter does to q and k."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def start_gguf(path):
    """A writer that has the metadata but no tensors yet."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_token_list([f"token {i} é" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_scores([0.5] * VOCAB)
    writer.add_add_bos_token(True)
    writer.add_eos_token_id(2)
    return writer


def finish_gguf(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path, weights, kind=GGMLQuantizationType.F32, rope_freqs=None, **metadata):
    """A GGUF file as llama.cpp's converter makes it; `__` in further metadata stands for a dot."""
    writer = start_gguf(path)
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    for name, (gguf_name, _) in TENSORS.items():
        add_tensor(writer, gguf_name, weights[name], kind)
    finish_gguf(writer)
    return path


def add_tensor(writer, name, tensor, kind):
    tensor = tensor.astype(np.float32)
    if "attn_q" in name or "attn_k" in name:
        tensor = permute(tensor, HEADS if "attn_q" in name else KV_HEADS)
    if tensor.ndim < 2 or kind is GGMLQuantizationType.F32:
        writer.add_tensor(name, tensor)
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
