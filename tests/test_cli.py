"""The command line: what is parsed, what is printed, and how it ends when something is wrong."""

import dataclasses
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.models import hub
from jaxllm.models.wheel_download import DownloadError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving import cli, cli_generate
from jaxllm.serving.cli_commands import Chat, Generate, Pull, get_fields

Messages = Sequence[dict[str, str]]


def output(text: str, prompt: str) -> RequestOutput:
    completion = CompletionOutput(0, text, [0] * len(text), 0.0, "stop")
    return RequestOutput("r", prompt, [0] * len(prompt), [completion], finished=True)


class FakeLLM:
    """Answers each prompt with its length."""

    made_with: dict[str, Any]
    params: SamplingParams

    def __init__(self, **fields: Any) -> None:
        FakeLLM.made_with = fields
        if fields["model"] == "nowhere":
            raise ValueError("model='nowhere' is not known: use a short name")

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool = True) -> list[RequestOutput]:
        FakeLLM.params = params
        return [output(f" {len(prompt)} characters", prompt) for prompt in prompts]

    def chat(self, messages: list[Messages], params: SamplingParams, use_tqdm: bool = True) -> list[RequestOutput]:
        FakeLLM.params = params
        return [output(f"{len(message)} message: {message[0]['content']}", "<chat>") for message in messages]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr(cli_generate, "LLM", FakeLLM)
    return FakeLLM


def parse_generate(*arguments: str) -> Generate:
    command = cli.parse(["generate", *arguments])
    assert isinstance(command, Generate)
    return command


def test_flags_are_the_fields() -> None:
    command = parse_generate(
        "m", "first", "second prompt", "--max-model-len", "64", "--dtype", "float32", "--enforce-eager",
        "--no-compilation-cache", "--top-k", "-1", "--temperature", "0", "--max-tokens", "None", "--ignore-eos",
    )  # fmt: skip
    assert command.engine.make_config() == EngineConfig(
        "m", max_model_len=64, dtype="float32", enforce_eager=True, compilation_cache=False
    )
    assert command.sampling.make_params() == SamplingParams(top_k=-1, temperature=0.0, max_tokens=None, ignore_eos=True)
    assert command.prompt.prompts == ("first", "second prompt")


def test_defaults_are_those_of_the_fields_but_for_the_length() -> None:
    command = parse_generate("m")
    assert command.engine.make_config() == EngineConfig("m")
    assert command.sampling.make_params() == SamplingParams(max_tokens=256)
    assert command.prompt.chat is False
    chat = cli.parse(["chat", "m"])
    assert isinstance(chat, Chat)
    assert chat.sampling.make_params() == SamplingParams(max_tokens=512)


def test_both_seeds_can_be_given() -> None:
    command = parse_generate("m", "--seed", "1", "--sampling-seed", "2")
    assert command.engine.make_config().seed == 1
    assert command.sampling.make_params().seed == 2


def test_flags_of_several_values_do_not_swallow_prompts() -> None:
    command = parse_generate("m", "--stop", "END", "--stop", "\n", "--stop-token-ids", "5", "prompt")
    assert command.sampling.make_params() == SamplingParams(max_tokens=256, stop=("END", "\n"), stop_token_ids=(5,))
    assert command.prompt.prompts == ("prompt",)


def test_prompt_that_looks_like_a_flag() -> None:
    assert parse_generate("m", "--", "--x").prompt.prompts == ("--x",)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_has_every_field(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    names = [item.name for kind in (EngineConfig, SamplingParams) for item in dataclasses.fields(kind)]
    for name in set(names) - {"model"}:
        assert "--" + name.replace("_", "-") in text
    assert "MODEL" in text
    assert "--sampling-seed" in text
    assert "a power of two" in " ".join(text.split()), "the help is the field's docstring"


def test_help_is_fast_because_nothing_heavy_is_imported() -> None:
    code = "import sys; from jaxllm.serving import cli; cli.parse(['pull']); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "generate"),
        (["frobnicate"], "frobnicate"),
        (["generate"], "MODEL"),
        (["generate", "m", "hi", "--blok-size", "3"], "--block-size"),
        (["generate", "m", "hi", "--dtype", "int3"], "bfloat16"),
        (["generate", "m", "hi", "--top-k", "many"], "--top-k"),
    ],
)
def test_mistyped_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "m", "hi", "--block-size", "3"], "error: block_size=3 is not a power of two: use 16, 32, 64 or"),
        (["generate", "m", "hi", "--top-k", "-3"], "error: top_k=-3 is not valid: use a whole number"),
        (["generate", "m", "hi", "--max-tokens", "0"], "error: max_tokens=0 is not valid"),
        (["generate", "nowhere", "hi"], "error: model='nowhere' is not known: use a short name\n"),
        (["pull", "nowhere"], "error: model='nowhere' is not known"),
    ],
)
def test_wrong_value(
    arguments: list[str], message: str, llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_debug_shows_where_an_error_came_from(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "nowhere", "hi", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (DownloadError("no network"), 1), (FileNotFoundError(2, "No such file"), 1)],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_command: Pull) -> None:
        raise error

    monkeypatch.setattr("jaxllm.serving.cli_pull.run", fail)
    assert cli.main(["pull"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_command: Pull) -> None:
        raise AssertionError("a broken invariant")

    monkeypatch.setattr("jaxllm.serving.cli_pull.run", fail)
    with pytest.raises(AssertionError):
        cli.main(["pull"])


def test_generate_prints_prompts_and_answers(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "m", "abc", "[red]x[/]", "--seed", "3", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Prompt: abc\nAnswer: 3 characters\n\nPrompt: [red]x[/]\nAnswer: 9 characters\n\n"
    assert captured.err.startswith("2 prompts, 12 tokens read, 26 written in ")
    assert captured.err.endswith(" tokens/s\n")
    assert llm.made_with == get_fields(EngineConfig("m", seed=3))
    assert llm.params == SamplingParams(temperature=0.0, max_tokens=256)


def test_generate_with_the_chat_template(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "m", "hi", "--chat"]) == 0
    assert capsys.readouterr().out == "Prompt: hi\nAnswer: 1 message: hi\n\n"


def test_generate_reads_standard_input(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n  two\r\n"))
    assert cli.main(["generate", "m"]) == 0
    assert capsys.readouterr().out == "Prompt: one\nAnswer: 3 characters\n\nPrompt:   two\nAnswer: 5 characters\n\n"


def test_generate_without_a_prompt(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert cli.main(["generate", "m"]) == 2
    assert "error: there is no prompt" in capsys.readouterr().err


def test_long_answer_is_not_wrapped(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "word " * 100
    assert cli.main(["generate", "m", prompt]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Prompt: {prompt}"


def test_pull_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out


def test_pull_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hub, "pull", lambda name: Path("/cache") / name)
    assert cli.main(["pull", "tiny"]) == 0
    assert capsys.readouterr().out == "/cache/tiny\n"
