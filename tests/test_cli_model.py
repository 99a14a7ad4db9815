"""The command line on real engines of tiny models, and on models that are broken."""

import io
import json
import sys
from pathlib import Path

import pytest
import tiny_model
import toy_checkpoints
from toy_tokenizers import byte_level

from jaxllm import LLM, SamplingParams
from jaxllm.serving import cli

type Capture = pytest.CaptureFixture[str]

FLAGS = ["--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager"]


def write_broken(folder: Path, **config: object) -> Path:
    """A checkpoint in three files, the configuration changed."""
    weights = toy_checkpoints.make_weights()
    toy_checkpoints.write_folder(folder, weights, shards=3, config=toy_checkpoints.CONFIG | config)
    byte_level().backend.save(str(folder / "tokenizer.json"))
    return folder


def check_error(command: list[str], capsys: Capture) -> str:
    """The message of a command that ends with one, on one screen and with nothing on standard output."""
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) < 10
    return captured.err


@pytest.mark.slow
def test_answers_are_those_of_llm(tmp_path: Path, capsys: Capture) -> None:
    model, prompts, answers = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    tiny_model.write_model(model)
    prompts.write_text(
        '{"prompt": "The sea", "max_tokens": 5}\n'
        '{"messages": [{"role": "user", "content": "hi"}], "seed": 1}\n'
        '{"prompt": "x", "temperature": 0}\n'
    )
    files = ["--input", str(prompts), "--output", str(answers)]
    assert cli.main(["generate", str(model), *files, *FLAGS, "--seed", "5", "--max-tokens", "8"]) == 0
    assert "3 prompts" in capsys.readouterr().err
    fields = {"max_model_len": 64, "max_num_seqs": 4, "enforce_eager": True}
    with LLM(str(model), seed=5, **fields) as llm:
        chat = llm.get_tokenizer().encode_chat([{"role": "user", "content": "hi"}])
        params = [
            SamplingParams(max_tokens=5),
            SamplingParams(max_tokens=8, seed=1),
            SamplingParams(max_tokens=8, temperature=0),
        ]
        expected = llm.generate(["The sea", chat, "x"], params, use_tqdm=False)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["token_ids"] for row in rows] == [output.outputs[0].token_ids for output in expected]
    assert [row["text"] for row in rows] == [output.outputs[0].text for output in expected]


def test_model_without_a_chat_template(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model.write_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert "has no chat template: use `jaxllm generate`" in check_error(["chat", str(model), *FLAGS], capsys)
    assert cli.main(["generate", str(model), "hi", "--max-tokens", "2", *FLAGS]) == 0
    assert "Prompt: hi\nAnswer: " in capsys.readouterr().out


def test_shard_is_missing(tmp_path: Path, capsys: Capture) -> None:
    model = write_broken(tmp_path / "model")
    (model / "model-00002-of-00003.safetensors").unlink()
    message = check_error(["generate", str(model), "hi", *FLAGS], capsys)
    assert "lacks model-00002-of-00003.safetensors" in message
    assert "download the missing files" in message


@pytest.mark.parametrize("config", [{"num_hidden_layers": 3}, {"hidden_size": 48}, {"vocab_size": 30}])
def test_config_contradicts_its_weights(config: dict[str, object], tmp_path: Path, capsys: Capture) -> None:
    message = check_error(["generate", str(write_broken(tmp_path / "model", **config)), "hi", *FLAGS], capsys)
    assert "does not hold the tensors of a llama model of its configuration" in message


def test_architecture_that_nobody_knows(tmp_path: Path, capsys: Capture) -> None:
    model = write_broken(tmp_path / "model", architectures=["LlammaForCausalLM"])
    message = check_error(["generate", str(model), "hi", *FLAGS], capsys)
    assert "'LlammaForCausalLM'] is not supported" in message
    assert "nearest" in message
    assert "LlamaForCausalLM" in message


def test_file_that_is_no_model(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"no model")
    assert "is not a GGUF file" in check_error(["generate", str(path), "hi"], capsys)
