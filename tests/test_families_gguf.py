"""GGUF files of each family hold the same model as the Hugging Face folder they were made from.

The files are written the way llama.cpp's converter does it: metadata and changes of tensors by hand,
names of tensors by the gguf package's own table.
"""

import dataclasses
import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh
from toy_checkpoints import finish_gguf, permute

from jaxllm.models.checkpoint import open_checkpoint
from jaxllm.models.gguf_config import with_rope_tensors
from jaxllm.models.layers import Setting
from jaxllm.models.loader import load_params
from jaxllm.models.parameters import define_model
from jaxllm.parallel.mesh import TENSOR_AXIS

TINY = Path(__file__).parent / "data" / "tiny"
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
}
"""Tiny checkpoint to the architecture that its GGUF file names."""


def convert(name, path):
    """The tiny checkpoint as a GGUF file."""
    fields = json.loads((TINY / name / "config.json").read_text())
    arch = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, arch)
    add_metadata(writer, arch, fields)
    tensors = safetensors.numpy.load_file(TINY / name / "model.safetensors")
    table = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), 8)
    for hf_name, tensor in tensors.items():
        writer.add_tensor(table.get_name(hf_name, (".weight", ".bias")), as_stored(arch, hf_name, tensor, fields))
    finish_gguf(writer)
    return path


def add_metadata(writer, arch, fields):
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_eos_token_id(fields["eos_token_id"])
    if "head_dim" in fields:
        writer.add_key_length(fields["head_dim"])
        writer.add_value_length(fields["head_dim"])
    add_rope(writer, fields["rope_parameters"])
    if arch not in ("llama", "qwen2"):
        writer.add_sliding_window(fields.get("sliding_window") or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(fields["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(fields["final_logit_softcapping"])
    if "layer_types" in fields and arch in ("gemma3", "olmo2"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in fields["layer_types"]])


def add_rope(writer, rope):
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def as_stored(arch, name, tensor, fields):
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in heads.items():
        if arch == "llama" and f".{part}." in name:
            return permute(tensor, fields[count])
    return tensor + 1 if "gemma" in arch and name.endswith("norm.weight") else tensor


def load(checkpoint):
    mesh = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
    definition = define_model(checkpoint.config, Setting(jnp.dtype("float32"), mesh, "xla"))
    return load_params(checkpoint, definition.specs, progress=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_is_the_same_model(name, tmp_path):
    with open_checkpoint(convert(name, tmp_path / "model.gguf")) as found, open_checkpoint(TINY / name) as expected:
        assert comparable(found.config, name) == comparable(expected.config, name)
        params = load(expected)
        for path, param in load(found).items():
            np.testing.assert_array_equal(param, params[path])


def comparable(config, name):
    """The configuration without what the metadata cannot say."""
    config = dataclasses.replace(config, family="", rms_norm_eps=np.float32(config.rms_norm_eps))
    if name == "qwen2":
        return dataclasses.replace(config, layers=())
    # llama.cpp takes the scale from the number of layers.
    return dataclasses.replace(config, attention_scale=None) if "gemma" in name else config


def test_longrope_factors_are_tensors():
    with open_checkpoint(TINY / "phi3") as checkpoint:
        config = checkpoint.config
    factors = {"rope_factors_long.weight": np.arange(1.0, 5), "rope_factors_short.weight": np.ones(4)}
    rope = with_rope_tensors(config, dict.fromkeys(factors, (4,)), factors.__getitem__).rope
    assert rope.freq_factors == (1, 2, 3, 4)
    assert rope.short_freq_factors == (1, 1, 1, 1)
    assert with_rope_tensors(config, {}, factors.__getitem__) == config
