"""A model converted to Orbax's format, and restored to other numbers of devices: the very bits, and the same answers."""

import dataclasses
import json
import re
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from jax.sharding import Mesh
from test_families_logits import QUICK

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.tokenizer import load_tokenizer
from jaxllm.model_config import LayerKind, RopeConfig
from jaxllm.models import conversion, orbax_checkpoint
from jaxllm.models.conversion import convert
from jaxllm.models.layers import Setting
from jaxllm.models.orbax_folder import find_tokenizer, read_model, write_facts
from jaxllm.models.parameters import define_model
from jaxllm.models.source import open_source
from jaxllm.parallel.mesh import TENSOR_AXIS
from jaxllm.parallel.partition import split_over
from jaxllm.runner import programs
from jaxllm.serving.cli import main

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_model.write_model(tmp_path_factory.mktemp("orbax") / "tiny")


@pytest.fixture(scope="module")
def converted(original):
    """Written from three devices."""
    folder = original.parent / "converted"
    assert main(["convert", str(original), str(folder), "--tensor-parallel-size", "3", "--dtype", "bfloat16"]) == 0
    return folder


def load(name, size, dtype="bfloat16", **fields):
    """Parameters on `size` devices, with what their specs ask for."""
    mesh = Mesh(np.array(jax.devices()[:size]), (TENSOR_AXIS,))
    with open_source(EngineConfig(str(name), **fields)) as source:
        setting = Setting(jnp.dtype(dtype), mesh, "xla")
        specs = define_model(split_over(source.config, size), setting).specs
        params = source.load(specs)
    assert list(params) == list(specs)
    for path, spec in specs.items():
        array = params[path]
        assert (array.shape, array.dtype, array.sharding) == (spec.shape, spec.dtype, spec.sharding), path
    return params


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert np.asarray(found[path]).tobytes() == np.asarray(array).tobytes(), path


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_restored_to_any_mesh(size, original, converted):
    """9 query and 3 K/V heads: two devices have empty places, six have copies and padded tables as well."""
    assert_same_bits(load(converted, size), load(original, size))


def test_several_batches(original, converted, monkeypatch):
    monkeypatch.setattr(orbax_checkpoint, "BYTES_AT_ONCE", 20_000)
    assert_same_bits(load(converted, 1), load(original, 1))


def test_random_weights(tmp_path):
    config = EngineConfig("tiny-llama", load_format="dummy", seed=3, tensor_parallel_size=2)
    convert(config, tmp_path / "out")
    for size in (1, 4):
        expected = load("tiny-llama", size, "float32", load_format="dummy", seed=3)
        assert_same_bits(load(tmp_path / "out", size, "float32"), expected)
    assert find_tokenizer(tmp_path / "out") is None


def test_an_engine_with_a_converted_model(original, converted, monkeypatch):
    monkeypatch.setitem(programs.EAGER_OPTIONS, "cpu", QUICK)
    messages = [{"role": "user", "content": "Hé 🙂"}]
    options = {"dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 1, "enforce_eager": True}
    with LLM(str(converted), tensor_parallel_size=3, **options) as llm:
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == load_tokenizer(original).encode_chat(messages)
    assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


@pytest.fixture(scope="module")
def in_pieces(original):
    """Written with every matrix in several pieces."""
    folder = original.parent / "pieces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax_checkpoint, "PIECE_SIZE", 1_000)
        convert(EngineConfig(str(original), dtype="bfloat16"), folder)
    return folder


@pytest.mark.parametrize(("size", "dtype"), [(1, "bfloat16"), (2, "float32"), (3, "bfloat16")])
def test_large_arrays_are_cut_into_pieces(size, dtype, original, in_pieces, converted, monkeypatch):
    names = [tree_names(folder) for folder in (in_pieces, converted)]
    assert len(names[0]) > 3 * len(names[1]) and "embed.weight.0" in names[0]
    expected = load(converted, size, dtype)
    monkeypatch.setattr(orbax_checkpoint, "PIECE_SIZE", 1_000)
    assert_same_bits(load(in_pieces, size, dtype), expected)


def tree_names(folder):
    metadata = json.loads((folder / "params" / "_METADATA").read_text())
    return {entry["key_metadata"][0]["key"] for entry in metadata["tree_metadata"].values()}


def test_a_large_array_does_not_lie_beside_its_pieces(tmp_path, monkeypatch):
    params = {"embed.weight": jnp.ones((40, 64)), "lm_head.weight": jnp.ones((40, 64))}
    whole, saved = [weakref.ref(array) for array in params.values()], []

    def save(checkpointer, folder, arguments):
        saved.append([len(arguments.item), *(array() is None for array in whole)])

    monkeypatch.setattr(orbax_checkpoint, "PIECE_SIZE", 1_000)
    monkeypatch.setattr(orbax_checkpoint.ocp.Checkpointer, "save", save)
    orbax_checkpoint.write_params(tmp_path / "out", params)
    assert saved == [[6, True, True]] and params == {}


def test_progress(converted, monkeypatch):
    """The bar counts the bytes of all parameters, as they are read."""
    monkeypatch.setattr(orbax_checkpoint, "BYTES_AT_ONCE", 20_000)
    updates = []

    class Bar(orbax_checkpoint.tqdm):
        def update(self, n=1):
            updates.append(n)

    monkeypatch.setattr(orbax_checkpoint, "tqdm", Bar)
    params = load(converted, 1)
    assert len(updates) > 3 and sum(updates) == sum(array.nbytes for array in params.values())


def test_a_model_without_the_command(demo_model, tmp_path):
    """The tokenizer of a GGUF file is that file's metadata."""
    write_facts(tmp_path, tiny_config(), demo_model)
    tokenizer, expected = load_tokenizer(find_tokenizer(tmp_path)), load_tokenizer(demo_model)
    text = "Hello, wörld 🙂"
    assert tokenizer.encode(text) == expected.encode(text)
    messages = [{"role": "user", "content": text}]
    assert tokenizer.render_chat(messages) == expected.render_chat(messages)
    assert (tmp_path / "tokenizer.gguf").stat().st_size < 1e7


def tiny_config():
    rope = RopeConfig(theta=5e5, scaling="llama3", freq_factors=(1.0, 2.5), rotary_dim=8)
    with open_source(EngineConfig("tiny-llama", load_format="dummy")) as source:
        layers = (LayerKind(window=4, rope=rope), LayerKind())
        return dataclasses.replace(source.config, rope=rope, layers=layers, eos_token_ids=(1, 5), attention_scale=0.5)


def test_facts_are_read_as_they_were_written(tmp_path):
    write_facts(tmp_path, tiny_config(), None)
    assert read_model(tmp_path) == tiny_config()


def test_a_folder_in_use_is_left_alone(tmp_path, original):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is there already: name a new folder"):
        convert(EngineConfig(str(original)), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_nothing_behind(tmp_path, original, monkeypatch, capsys):
    folder, usage = tmp_path / "out", shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        assert main(["convert", str(original), str(folder)]) == 1
    assert re.search(r"has no room for the model: it takes .*B, and 1000 B are free", capsys.readouterr().err)
    assert not folder.exists()

    def fail(*_):
        raise OSError("the disk went away")

    monkeypatch.setattr(conversion, "write_facts", fail)
    with pytest.raises(OSError, match="the disk went away"):
        convert(EngineConfig(str(original)), folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"jaxllm_format": 1}, "has format 1, not 2: convert the model again"),
        ({"model": {}}, "does not describe a model .*: convert the model again"),
        ({"hidden_size": 96}, "holds other parameters than its model has .*embed.weight.*: convert it again"),
        ({"num_layers": 1}, "holds other parameters than its model has .*layers.1.*: convert it again"),
    ],
)
def test_broken_folders(change, message, converted, tmp_path):
    fields = json.loads((converted / "config.json").read_text())
    (tmp_path / "params").symlink_to(converted / "params")
    fields = fields | change if change.keys() <= fields.keys() else fields | {"model": fields["model"] | change}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, 1)


def test_parameters_that_are_not_whole(converted, tmp_path):
    (tmp_path / "params").mkdir()
    (tmp_path / "config.json").write_bytes((converted / "config.json").read_bytes())
    with pytest.raises(ValueError, match="is not whole"):
        load(tmp_path, 1)
