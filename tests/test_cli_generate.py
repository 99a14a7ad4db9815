"""`jaxllm generate`: prompts from arguments, files and standard input; answers as text and as JSONL."""

import dataclasses
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving import cli, cli_generate
from jaxllm.serving.cli_flags import get_fields

type Capture = pytest.CaptureFixture[str]

MAX_PROMPT = 600


class FakeLLM:
    """Its token ids are the characters' numbers; a chat is its messages' contents, each behind its role."""

    made_with: dict[str, Any]
    params: list[SamplingParams]
    priority: list[int]
    has_chat_template = True
    runs = 0

    def __init__(self, **fields: Any) -> None:
        FakeLLM.made_with = fields
        FakeLLM.runs = 0
        if fields["model"] == "nowhere":
            raise ValueError("model='nowhere' is not known: use a short name")
        self.engine = self

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_tokenizer(self) -> "FakeLLM":
        return self

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return _encode("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def make_request(
        self, request_id: str, prompt: Any, params: SamplingParams, _priority: int
    ) -> tuple[None, SimpleNamespace]:
        assert params.seed is not None, "a check that draws a seed would change the answers"
        prompt_ids = _encode(prompt) if isinstance(prompt, str) else prompt
        if len(prompt_ids) > MAX_PROMPT:
            raise ValueError(f"prompt has {len(prompt_ids)} tokens: shorten it")
        return None, SimpleNamespace(prompt_ids=prompt_ids)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: list[SamplingParams], use_tqdm: bool, priority: list[int]
    ) -> list[RequestOutput]:
        FakeLLM.params, FakeLLM.priority = params, priority
        FakeLLM.runs += 1
        return [_answer(list(prompt)) for prompt in prompts]


def _encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def _answer(prompt_ids: list[int]) -> RequestOutput:
    text = f" {len(prompt_ids)} characters"
    completion = CompletionOutput(0, text, [7] * len(text), 0.0, "stop", stop_reason=".")
    return RequestOutput("r", None, prompt_ids, [completion], finished=True)


@pytest.fixture(autouse=True)
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr(cli_generate, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "has_chat_template", True)
    return FakeLLM


def type_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prints_prompts_and_answers(llm: type[FakeLLM], capsys: Capture) -> None:
    assert cli.main(["generate", "m", "abc", "[red]x[/]", "--seed", "3", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Prompt: abc\nAnswer: 3 characters\n\nPrompt: [red]x[/]\nAnswer: 9 characters\n\n"
    assert captured.err.startswith("2 prompts, 12 tokens read, 26 written in ")
    assert captured.err.endswith(" tokens/s\n")
    assert llm.made_with == get_fields(EngineConfig("m", seed=3))
    assert llm.params == [SamplingParams(temperature=0.0, max_tokens=256)] * 2


def test_model_that_cannot_be_used(capsys: Capture) -> None:
    assert cli.main(["generate", "nowhere", "hi"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: model='nowhere' is not known: use a short name\n"
    assert captured.out == ""


def test_chat_template(capsys: Capture) -> None:
    assert cli.main(["generate", "m", "hi", "--chat"]) == 0
    assert capsys.readouterr().out == f"Prompt: hi\nAnswer: {len('<user>hi')} characters\n\n"


def test_long_answer_is_not_wrapped(capsys: Capture) -> None:
    prompt = "word " * 100
    assert cli.main(["generate", "m", prompt]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Prompt: {prompt}"


@pytest.mark.parametrize("flags", [[], ["--input", "-"]])
def test_standard_input(flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    type_in(monkeypatch, b"one\n\n  two\r\n")
    assert cli.main(["generate", "m", *flags]) == 0
    assert capsys.readouterr().out == "Prompt: one\nAnswer: 3 characters\n\nPrompt:   two\nAnswer: 5 characters\n\n"


def test_file_of_text(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffé\n[1, 2]\n".encode())
    assert cli.main(["generate", "m", "--input", str(path)]) == 0
    assert capsys.readouterr().out == "Prompt: é\nAnswer: 1 characters\n\nPrompt: [1, 2]\nAnswer: 6 characters\n\n"


def test_jsonl_in_and_out(llm: type[FakeLLM], tmp_path: Path, capsys: Capture) -> None:
    path, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    messages = [{"role": "user", "content": "hé"}]
    rows = [
        {"prompt": "abc", "temperature": 0, "stop": ["."], "max_tokens": None},
        {"request_id": "mine", "messages": messages, "priority": -3},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    assert cli.main(["generate", "m", "--input", str(path), "--output", str(answers), "--top-p", "0.5"]) == 0
    assert llm.params == [
        SamplingParams(temperature=0, stop=["."], max_tokens=None, top_p=0.5),
        SamplingParams(max_tokens=256, top_p=0.5),
    ]
    assert llm.priority == [0, -3]
    assert rows_in(answers) == [
        {
            "request_id": "0",
            "index": 0,
            "prompt": "abc",
            "text": " 3 characters",
            "token_ids": [7] * 13,
            "finish_reason": "stop",
            "stop_reason": ".",
            "usage": {"prompt_tokens": 3, "completion_tokens": 13, "total_tokens": 16},
        },
        {
            "request_id": "mine",
            "index": 1,
            "messages": messages,
            "text": " 8 characters",
            "token_ids": [7] * 13,
            "finish_reason": "stop",
            "stop_reason": ".",
            "usage": {"prompt_tokens": 8, "completion_tokens": 13, "total_tokens": 21},
        },
    ]
    assert "é" in answers.read_text(), "text is written as it is"
    assert capsys.readouterr().out == ""


def test_every_answer_of_a_prompt_is_written(llm: type[FakeLLM], tmp_path: Path, monkeypatch, capsys: Capture) -> None:
    def two_answers(self, prompts, params, use_tqdm, priority):
        outputs = [_answer(list(prompt)) for prompt in prompts]
        for output in outputs:
            second = dataclasses.replace(output.outputs[0], index=1, text="another")
            output.outputs.append(second)
        return outputs

    monkeypatch.setattr(llm, "generate", two_answers)
    assert cli.main(["generate", "m", "ab", "--n", "2"]) == 0
    assert capsys.readouterr().out.count("Answer: ") == 2
    file = tmp_path / "answers.jsonl"
    assert cli.main(["generate", "m", "ab", "--n", "2", "--output", str(file)]) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(record["index"], record["answer_index"]) for record in records] == [(0, 0), (0, 1)]
    assert records[1]["text"] == "another"


def test_jsonl_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    type_in(monkeypatch, b'\n {"prompt": "abc"}\n')
    assert cli.main(["generate", "m", "--output-format", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "abc"
    type_in(monkeypatch, b'{"prompt": "abc"}\n')
    assert cli.main(["generate", "m", "--input-format", "text"]) == 0
    assert capsys.readouterr().out.startswith('Prompt: {"prompt": "abc"}\n')


def test_text_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.txt"
    path.write_text("an older and much longer text that is replaced as a whole, not only in part")
    assert cli.main(["generate", "m", "abc", "--output", str(path)]) == 0
    assert path.read_text() == "Prompt: abc\nAnswer: 3 characters\n\n"


def test_row_put_to_the_chat_template_keeps_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert cli.main(["generate", "m", "hi", "--chat", "--output", str(path)]) == 0
    (row,) = rows_in(path)
    assert row["prompt"] == "hi"
    assert row["usage"]["prompt_tokens"] == len("<user>hi")


BAD_ROWS = {
    '{"prompt": "x", "temprature": 0}': "'temprature' is not known: did you mean 'temperature'?",
    '{"prompt": "x", "temperature": "hot"}': "temperature='hot' is not valid: use 0 (greedy) or above",
    '{"prompt": "x", "temperature": NaN}': "temperature=nan is not valid",
    '{"prompt": "x", "stop": 5}': "stop=5 is not valid",
    '{"prompt": "x", "max_tokens": 1, "min_tokens": 2}': "min_tokens=2 is above max_tokens=1",
    '{"prompt": ': "it is not JSON: Expecting value at column 12",
    "plain text": "it is not JSON: Expecting value at column 1",
    '["x"]': 'it is a JSON list: write an object, as {"prompt": "Hello"}',
    '{"max_tokens": 3}': 'it needs either "prompt" or "messages"',
    '{"prompt": "x", "messages": []}': 'it needs either "prompt" or "messages"',
    '{"prompt": 5}': "prompt=5 is not valid: give a text",
    '{"prompt": null}': "prompt=None is not valid: give a text",
    '{"messages": []}': "messages=[] is not valid",
    '{"messages": [{"role": "user"}]}': "messages[0] has content None: give a string",
    '{"prompt": "\\ud800"}': "'\\ud800' at position 0 is no character",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': "'\\ud800' at position 0 is no character",
    '{"prompt": "x", "request_id": [1]}': "request_id=[1] is not valid: give a text or a number",
    '{"prompt": "x", "request_id": "\\ud800"}': "'\\ud800' at position 0 is no character",
    '{"messages": [{"role": "u", "content": "x", "name": "\\ud800"}]}': "'\\ud800' at position 40 is no character",
    '{"prompt":' + "[" * 10**5: "it is nested too deeply",
    '{"prompt": "x", "priority": "high"}': "priority='high' is not valid: use a whole number",
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.items())
def test_bad_row_is_named_and_nothing_is_run(
    row: str, message: str, llm: type[FakeLLM], tmp_path: Path, capsys: Capture
) -> None:
    llm.runs = 0
    path, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{row}\n')
    answers.write_text("of an earlier run")
    assert cli.main(["generate", "m", "--input", str(path), "--output", str(answers)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}, line 3: {message}")
    assert llm.runs == 0
    assert answers.read_text() == "of an earlier run"


@pytest.mark.parametrize(("model", "prompt"), [("nowhere", "fine"), ("m", "long" * 200)])
def test_a_run_that_fails_leaves_the_files_as_they_were(model: str, prompt: str, tmp_path: Path) -> None:
    """Answers may go where the prompts are read from: those must not be lost."""
    path = tmp_path / "prompts.txt"
    path.write_text(prompt)
    command = ["generate", "--input", str(path), "--output", str(path), "--output-format", "text"]
    assert cli.main([*command, model]) == 2
    assert path.read_text() == prompt
    path.write_text("fine")
    assert cli.main([*command, "m"]) == 0
    assert path.read_text() == "Prompt: fine\nAnswer: 4 characters\n\n"


def test_answers_go_to_devices_and_pipes(tmp_path: Path) -> None:
    assert cli.main(["generate", "m", "fine", "--output", "/dev/null"]) == 0
    reader, writer = os.pipe()
    assert cli.main(["generate", "m", "fine", "--output", f"/dev/fd/{writer}"]) == 0
    assert os.read(reader, 100).startswith(b"Prompt: fine")
    os.close(reader)
    os.close(writer)


def test_prompt_that_the_engine_refuses_is_named(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"fine\n\n{'long' * 200}\n")
    assert cli.main(["generate", "m", "--input", str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path}, line 3: prompt has 800 tokens: shorten it\n"
    assert FakeLLM.runs == 0
    assert cli.main(["generate", "m", "fine", "long" * 200]) == 2
    assert capsys.readouterr().err == "error: prompt 2: prompt has 800 tokens: shorten it\n"


def test_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    type_in(monkeypatch, b"fine\n\xff\xfe\n")
    assert cli.main(["generate", "m"]) == 2
    assert capsys.readouterr().err == "error: standard input, line 2: byte 0xff is not UTF-8: save it as UTF-8\n"
    assert cli.main(["generate", "m", "fine", "\udcff"]) == 2
    assert capsys.readouterr().err.startswith("error: prompt 2: '\\udcff' at position 0 is no character")


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_no_prompt(data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    type_in(monkeypatch, data)
    assert cli.main(["generate", "m"]) == 2
    assert "error: there is no prompt in standard input" in capsys.readouterr().err


def test_files_that_cannot_be_used(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["generate", "m", "--input", str(tmp_path / "none.txt")]) == 2
    assert "none.txt' cannot be read: No such file or directory" in capsys.readouterr().err
    assert cli.main(["generate", "m", "--input", str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err
    assert cli.main(["generate", "m", "hi", "--output", str(tmp_path / "no" / "where.txt")]) == 2
    assert "where.txt' cannot be written: No such file or directory" in capsys.readouterr().err


def test_two_sources_of_prompts(capsys: Capture) -> None:
    assert cli.main(["generate", "m", "hi", "--input", "prompts.txt"]) == 2
    assert "give one or the other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "flags"), [(b"hi", ["--chat"]), (b'{"messages": [{"role": "u", "content": ""}]}', [])]
)
def test_model_without_a_chat_template(
    data: bytes, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(FakeLLM, "has_chat_template", False)
    type_in(monkeypatch, data)
    assert cli.main(["generate", "m", *flags]) == 2
    assert capsys.readouterr().err.startswith("error: model='m' has no chat template: leave --chat away")
    type_in(monkeypatch, b"hi")
    assert cli.main(["generate", "m"]) == 0
