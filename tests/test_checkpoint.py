"""Checkpoints of both file formats: what is read from them, and what is said about broken ones."""

import json
import shutil

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from toy_checkpoints import (
    CONFIG,
    HEAD_DIM,
    HIDDEN,
    TENSORS,
    VOCAB,
    finish_gguf,
    make_weights,
    start_gguf,
    write_folder,
    write_gguf,
)

from jaxllm.models import gguf_checkpoint
from jaxllm.models.checkpoint import open_checkpoint
from jaxllm.models.gguf_file import read_gguf_header


@pytest.fixture
def weights():
    return make_weights()


@pytest.mark.parametrize("shards", [1, 3])
def test_folder(tmp_path, weights, shards):
    with open_checkpoint(write_folder(tmp_path / "model", weights, shards)) as checkpoint:
        assert checkpoint.family.name == "llama"
        assert checkpoint.config.head_dim == HEAD_DIM
        assert checkpoint.shapes == {name: tensor.shape for name, tensor in weights.items()}
        for name, tensor in weights.items():
            np.testing.assert_array_equal(checkpoint.read(name), tensor)


def test_folder_of_bfloat16(tmp_path):
    weights = make_weights(ml_dtypes.bfloat16)
    config = {name: value for name, value in CONFIG.items() if name != "torch_dtype"}
    with open_checkpoint(write_folder(tmp_path / "model", weights, config=config)) as checkpoint:
        assert checkpoint.config.dtype == "bfloat16"  # of the tensors, as config.json does not say
        read = checkpoint.read("model.embed_tokens.weight")
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, weights["model.embed_tokens.weight"])


def test_arrays_outlive_the_checkpoint(tmp_path, weights):
    for path in (write_folder(tmp_path / "model", weights), write_gguf(tmp_path / "model.gguf", weights)):
        with open_checkpoint(path) as checkpoint:
            name = checkpoint.names.sources_of("embed.weight")[0]
            read = checkpoint.read(name)
        np.testing.assert_array_equal(read, weights["model.embed_tokens.weight"])
        with pytest.raises(AssertionError, match="closed"):
            checkpoint.read(name)


def test_generation_config_decides_what_ends_an_answer(tmp_path, weights):
    path = write_folder(tmp_path / "model", weights)
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.6}')
    assert open_checkpoint(path).config.eos_token_ids == (3, 4)
    (path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert open_checkpoint(path).config.eos_token_ids == (2,)


def test_gguf_undoes_the_permutation(tmp_path, weights):
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", weights)) as checkpoint:
        assert checkpoint.config.attention_bias
        assert not checkpoint.config.tie_word_embeddings
        assert checkpoint.config.dtype == "float32"
        for name, (gguf_name, shape) in TENSORS.items():
            assert checkpoint.shapes[gguf_name] == shape
            np.testing.assert_array_equal(checkpoint.read(gguf_name), weights[name])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_dequantises(tmp_path, weights, kind):
    kind = GGMLQuantizationType[kind]
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", weights, kind)) as checkpoint:
        assert checkpoint.config.dtype == "float32"
        read = checkpoint.read("blk.1.ffn_up.weight")
    assert read.dtype == np.float32
    stored = gguf.quants.quantize(weights["model.layers.1.mlp.up_proj.weight"], kind)
    np.testing.assert_array_equal(read, gguf.quants.dequantize(stored, kind))


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ2_0"])
def test_gguf_dequantises_large_tensors_piecewise(tmp_path, monkeypatch, kind):
    kind = GGMLQuantizationType[kind]
    blocks_bytes = GGML_QUANT_SIZES[kind][1] * 512 // GGML_QUANT_SIZES[kind][0]
    stored = np.random.default_rng(3).integers(0, 60, (7, blocks_bytes), np.uint8)
    writer = start_gguf(tmp_path / "model.gguf")
    writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
    finish_gguf(writer)
    monkeypatch.setattr(gguf_checkpoint, "_ELEMENTS_AT_ONCE", 1024)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        read = checkpoint.read("token_embd.weight")
    assert read.shape == (7, 512)
    np.testing.assert_array_equal(read, gguf.quants.dequantize(stored, kind))


def test_gguf_type_that_cannot_be_dequantised(tmp_path):
    writer = start_gguf(tmp_path / "model.gguf")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.int32))
    finish_gguf(writer)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint, pytest.raises(ValueError, match="I32, not supported"):
        checkpoint.read("token_embd.weight")


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_gguf_of_half_precision(tmp_path, weights, kind, dtype):
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", weights, GGMLQuantizationType[kind])) as checkpoint:
        assert checkpoint.config.dtype == dtype
        read = checkpoint.read("token_embd.weight")
        assert checkpoint.read("output_norm.weight").dtype == np.float32
    assert read.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read, weights["model.embed_tokens.weight"].astype(dtype))


def test_gguf_rope_factors(tmp_path, weights):
    path = write_gguf(tmp_path / "model.gguf", weights, rope_freqs=[1, 1, 1, 2, 4, 8, 8, 8])
    assert open_checkpoint(path).config.rope.freq_factors == (1, 1, 1, 2, 4, 8, 8, 8)


def test_gguf_header_is_what_the_gguf_package_reads(tmp_path, weights):
    path = write_gguf(tmp_path / "model.gguf", weights, GGMLQuantizationType.Q8_0)
    header, reader = read_gguf_header(path), GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == {name: field.contents() for name, field in fields.items()}
    assert header.metadata["tokenizer.ggml.tokens"][3] == "token 3 é"
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours == (tuple(tensor.shape[::-1]), tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def test_gguf_header_is_read_once_and_again_after_a_change(tmp_path, weights):
    path = write_gguf(tmp_path / "model.gguf", weights)
    first = read_gguf_header(path)
    assert read_gguf_header(path) is first
    write_gguf(path, weights, tokenizer__ggml__padding_token_id=5)
    assert read_gguf_header(path).metadata["tokenizer.ggml.padding_token_id"] == 5


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.05, 0.1, 0.5, 0.999])
def test_gguf_cut_short(tmp_path, weights, share):
    content = write_gguf(tmp_path / "whole.gguf", weights).read_bytes()
    path = tmp_path / "part.gguf"
    path.write_bytes(content[: max(int(len(content) * share), 4)])
    with pytest.raises(ValueError, match=r"part\.gguf is cut short.*download it again"):
        open_checkpoint(path)


def test_gguf_cut_anywhere_in_its_header(tmp_path, weights):
    content = write_gguf(tmp_path / "whole.gguf", weights).read_bytes()
    path = tmp_path / "part.gguf"
    first_tensor = min(tensor.start for tensor in read_gguf_header(tmp_path / "whole.gguf").tensors.values())
    for end in range(4, first_tensor, 7):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match="cut short"):
            open_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML and more", b"\x00" * 100])
def test_not_a_gguf(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file.*give"):
        open_checkpoint(path)


def patch(path, old, new):
    """Replaces the first occurrence of some bytes by as many others."""
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))


def u32(value):
    return int(value).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF" + u32(3), b"GGUF" + u32(1), "version 1 is not supported"),
        (b"GGUF" + u32(3), b"GGUF" + u32(0x03000000), "version 50331648 is not supported"),
        (b"llama.block_count" + u32(4), b"llama.block_count" + u32(77), "'llama.block_count' has the unknown type 77"),
        (b"ggml.tokens" + u32(9) + u32(8), b"ggml.tokens" + u32(9) + u32(9), "array of arrays"),
        (b"token 3 \xc3\xa9", b"token 3 \xff\xff", "no UTF-8"),
        (b"general.architecture", b"general.architektur!", "general.architecture is missing"),
    ],
)
def test_damaged_gguf(tmp_path, weights, old, new, message):
    path = write_gguf(tmp_path / "model.gguf", weights)
    patch(path, old, new)
    with pytest.raises(ValueError, match=message) as error:
        open_checkpoint(path)
    assert "model.gguf" in str(error.value)


def test_gguf_with_an_unknown_tensor_type(tmp_path, weights):
    path = write_gguf(tmp_path / "model.gguf", weights)
    patch(
        path,
        b"output_norm.weight" + u32(1) + u32(HIDDEN) + u32(0) * 2,
        b"output_norm.weight" + u32(1) + u32(HIDDEN) + u32(0) + u32(99),
    )
    with pytest.raises(ValueError, match=r"'output_norm\.weight' has the unknown type 99"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split__count", 3, "join them"),
        ("general__alignment", 33, "general.alignment=33"),
        ("llama__expert_count", 4, "llama.expert_count=4"),
    ],
)
def test_gguf_that_is_not_supported(tmp_path, weights, key, value, message):
    path = write_gguf(tmp_path / "model.gguf", weights, **{key: value})
    with pytest.raises(ValueError, match=rf"model\.gguf.*{message}"):
        open_checkpoint(path)


def test_missing_path(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.*does not exist.*give a GGUF file or"):
        open_checkpoint(tmp_path / "nowhere")


def remove_shard(path):
    (path / "model-00002-of-00003.safetensors").unlink()


def remove_all_shards(path):
    for file in path.glob("*.safetensors"):
        file.unlink()


def remove_index(path):
    (path / "model.safetensors.index.json").unlink()


def empty_index(path):
    (path / "model.safetensors.index.json").write_text("{}")


def remove_config(path):
    (path / "config.json").unlink()


def break_config(path):
    (path / "config.json").write_text('{"architectures": [')


def replace_config(path):
    (path / "config.json").write_text("[]")


def other_architecture(path):
    (path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["BertModel"]}))


def long_header(path):
    (path / "model-00001-of-00003.safetensors").write_bytes(b"<!DOCTYPE html>")


def no_header(path):
    (path / "model-00001-of-00003.safetensors").write_bytes((6).to_bytes(8, "little") + b"nonono")


def foreign_header(path):
    (path / "model-00001-of-00003.safetensors").write_bytes((8).to_bytes(8, "little") + b'{"a": 1}')


def cut_short(path):
    file = path / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def wrong_size(path):
    file = path / "model-00001-of-00003.safetensors"
    patch(file, f"[{VOCAB},{HIDDEN}]".encode(), f"[{VOCAB},{HIDDEN + 1}]".encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_shard, "lacks model-00002-of-00003.safetensors.*download the missing"),
        (remove_all_shards, "lacks model-00001.*model-00003"),
        (remove_index, "has neither model.safetensors nor model.safetensors.index.json: download"),
        (empty_index, "index.json has no weight_map"),
        (remove_config, "has no config.json: give"),
        (break_config, "config.json is no valid JSON.*download"),
        (replace_config, "config.json holds no JSON object"),
        (other_architecture, "BertModel.*is not supported.*LlamaForCausalLM"),
        (long_header, "model-00001-of-00003.safetensors is broken.*Download it again"),
        (no_header, "model-00001-of-00003.safetensors is broken.*Download it again"),
        (foreign_header, "model-00001-of-00003.safetensors is broken.*Download it again"),
        (cut_short, "model-00001-of-00003.safetensors is cut short.*download it again"),
        (wrong_size, "model-00001-of-00003.safetensors is broken.*wrong size"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_folder(tmp_path, weights, damage, message):
    path = write_folder(tmp_path / "model", weights, shards=3)
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


def test_folder_of_gguf_files_names_one(tmp_path, weights):
    path = write_gguf(tmp_path / "tiny.gguf", weights)
    with pytest.raises(ValueError, match=r"no config.json: name one of its GGUF files \(tiny\.gguf\)"):
        open_checkpoint(path.parent)


def test_demo_model(demo_model, tmp_path):
    with open_checkpoint(demo_model) as checkpoint:
        config = checkpoint.config
        assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (9, 3, 64, 30)
        assert config.tie_word_embeddings
        assert config.eos_token_ids == (2,)
        assert len(checkpoint.shapes) == 272
        assert checkpoint.read("blk.29.attn_q.weight").shape == (576, 576)
    half = tmp_path / "half.gguf"
    shutil.copyfile(demo_model, half)
    with half.open("r+b") as file:
        file.truncate(half.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"half\.gguf is cut short"):
        open_checkpoint(half)
