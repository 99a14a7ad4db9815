"""load_format="dummy": random weights from a configuration alone, and a tokenizer where there is none."""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
import toy_checkpoints
from jax.sharding import Mesh

from jaxllm import LLM, EngineConfig, SamplingParams
from jaxllm.engine.detokenizer import IncrementalDetokenizer, TextVocabulary
from jaxllm.engine.stand_in_tokenizer import stand_in_tokenizer
from jaxllm.models import hub
from jaxllm.models.dummy import DEVIATION, _maker, _normal, _standard_normal, dummy_model, dummy_params
from jaxllm.models.expansion import Expansion
from jaxllm.models.layers import Setting
from jaxllm.models.parameters import define_model
from jaxllm.models.shapes import SHAPES
from jaxllm.models.source import open_source
from jaxllm.serving import cli

SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 32}
"""Few executables, as compiling them takes longest."""
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def specs_of(config, num_devices=1):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))
    return define_model(config, Setting(jnp.dtype("bfloat16"), mesh, "xla")).specs


@pytest.fixture
def config_only(tmp_path):
    """A folder with nothing but a config.json, whose end-of-sequence tokens are half of the vocabulary."""
    path = tmp_path / "shape"
    path.mkdir()
    config = tiny_model.CONFIG | {"eos_token_id": list(range(0, tiny_model.VOCAB, 2))}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("llama-3.1-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496), ("qwen3-0.6b", 596_049_920 + 28 * 128)],
)
def test_shapes_have_the_number_of_parameters_of_their_models(name, num_parameters):
    """Qwen's norm of queries is held once for each of the two heads in a group."""
    config, path = dummy_model(name)
    assert path is None
    assert sum(math.prod(spec.shape) for spec in specs_of(config).values()) == num_parameters


def test_facts_of_a_shape():
    config, _ = dummy_model("llama-3.1-8b")
    assert (config.max_position_embeddings, config.vocab_size, config.dtype) == (131072, 128256, "bfloat16")
    assert (config.rope.scaling, config.rope.theta, config.rope.factor) == ("llama3", 500000.0, 8.0)
    assert dummy_model("qwen3-0.6b")[0].qk_norm == "head"


def test_weights_are_random_and_norms_are_ones():
    config, _ = dummy_model("tiny-llama")
    specs = specs_of(config)
    params = dummy_params(config, specs, seed=3)
    assert params.keys() == specs.keys()
    for path, spec in specs.items():
        array = params[path]
        assert (array.shape, array.dtype, array.sharding) == (spec.shape, spec.dtype, spec.sharding)
        values = np.asarray(array, np.float32)
        if "norm" in path:
            assert (values == 1).all()
        else:
            assert values.std() == pytest.approx(DEVIATION, rel=0.05)
            assert abs(values.mean()) < 0.1 * DEVIATION
    layers = [np.asarray(params[f"layers.{index}.mlp.down.weight"]) for index in (0, 1)]
    assert not np.array_equal(*layers)


def test_no_bits_make_an_infinite_weight():
    lowest, highest = _standard_normal(jnp.asarray([0, 2**32 - 1], jnp.uint32))
    assert -6 < lowest < -5
    assert highest == -lowest


def test_weights_take_no_memory_but_their_own():
    config, _ = dummy_model("qwen3-0.6b")
    spec = specs_of(config)["embed.weight"]
    expansion = Expansion.of("embed.weight", spec, config)
    compiled = _maker(_normal, expansion, spec.dtype, spec.sharding).lower(np.uint32(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


def test_seed_decides_and_devices_do_not():
    config, _ = dummy_model("tiny-llama")
    one, two = specs_of(config), specs_of(config, num_devices=2)
    path = "layers.0.mlp.gate_up.weight"
    first = dummy_params(config, {path: one[path]}, seed=1)[path]
    split = dummy_params(config, {path: two[path]}, seed=1)[path]
    assert len(split.sharding.device_set) == 2
    np.testing.assert_array_equal(first, split)
    assert not np.array_equal(first, dummy_params(config, {path: one[path]}, seed=2)[path])


def test_engine_from_a_config_alone(config_only):
    with LLM(str(config_only), load_format="dummy", max_model_len=64, **SMALL) as llm:
        assert llm.get_tokenizer().vocab_size == tiny_model.VOCAB
        (output,) = llm.generate(["Hé 🙂"], GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == list("Hé 🙂".encode())
        assert len(output.outputs[0].token_ids) == GREEDY.max_tokens, "no token of random weights ends an answer"
        assert output.outputs[0].finish_reason == "length"
        (answer,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
        assert bytes(answer.prompt_token_ids) == b"user: Hi\nassistant:"


def test_generate_on_the_command_line(config_only, capsys):
    flags = ["--load-format", "dummy", "--max-model-len", "64", "--max-tokens", "4", "--chat", "--max-num-seqs", "1"]
    flags += ["--max-num-batched-tokens", "32"]
    assert cli.main(["generate", str(config_only), "Hi", *flags]) == 0
    assert "Answer:" in capsys.readouterr().out


def test_own_tokenizer_is_taken_where_there_is_one(tmp_path):
    folder = tiny_model.write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with open_source(EngineConfig(str(folder), load_format="dummy")) as source:
        assert source.tokenizer_path == folder


def test_gguf_file_gives_its_shape(tmp_path):
    path = toy_checkpoints.write_gguf(tmp_path / "model.gguf", toy_checkpoints.make_weights())
    config, found = dummy_model(str(path))
    assert (config.hidden_size, config.eos_token_ids, found) == (toy_checkpoints.HIDDEN, (), path)


def test_weights_of_a_hub_model_are_not_fetched(monkeypatch, config_only):
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: asked.append(options) or config_only)
    config, _ = dummy_model("org/name")
    assert config.vocab_size == tiny_model.VOCAB
    assert "*.json" in asked[0]["allow_patterns"]
    assert not [pattern for pattern in asked[0]["allow_patterns"] if "safetensors" in pattern]


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match=r"'llama-3\.1-8b' is a shape, which has no weights: add load_format='dummy'"):
        hub.resolve_model("llama-3.1-8b")
    with pytest.raises(ValueError, match=r"With load_format='dummy' also a shape: llama-3\.1-8b"):
        dummy_model("llama-9")
    with pytest.raises(ValueError, match="load_format='dumy' is unknown: use one of auto, dummy"):
        EngineConfig("m", load_format="dumy")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="vocabulary of 24 is too small"):
        stand_in_tokenizer(24)


def test_stand_in_tokenizer_keeps_text_and_shows_every_id():
    tokenizer = stand_in_tokenizer(1000)
    text = "".join(map(chr, range(0x250))) + "\n你🙂"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([72, 999, 256]) == "H <999> <256>"
    assert (tokenizer.vocab_size, tokenizer.special_ids, tokenizer.eos_token_id) == (1000, frozenset(), None)
    detokenizer = IncrementalDetokenizer(TextVocabulary(tokenizer), [])
    assert "".join(detokenizer.append([token_id]) for token_id in ids) + detokenizer.flush() == text


def test_every_shape_can_be_a_model():
    for name in SHAPES:
        config = dataclasses.replace(dummy_model(name)[0], num_layers=1, layers=())
        assert specs_of(config)


def test_nothing_of_other_formats_or_of_the_command_line_is_imported():
    """What a machine needs that only measures."""
    code = (
        "import sys; from jaxllm import LLM; from jaxllm.bench import runs; from jaxllm.models.dummy import dummy_model; "
        "dummy_model('tiny-llama'); print({'gguf', 'tyro', 'llguidance'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
