"""The command line: what is parsed, what help shows, and how it ends when something is wrong."""

import dataclasses
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm.config import ENGINE_TOPICS, EngineConfig
from jaxllm.models import hub
from jaxllm.models.wheel_download import DownloadError
from jaxllm.sampling_params import SAMPLING_TOPICS, SamplingParams
from jaxllm.serving import cli
from jaxllm.serving.cli_commands import MODULES, Chat, Generate, Pull
from jaxllm.serving.cli_flags import by_topic, get_docs

COMMANDS = [kind.__name__.lower() for kind in MODULES]


def parse_generate(*arguments: str) -> Generate:
    command = cli.parse(["generate", *arguments])
    assert isinstance(command, Generate)
    return command


def show_help(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*command, "--help"])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_closed_streams_are_as_good_as_empty_ones() -> None:
    program = "import sys; from jaxllm.serving import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = f'exec "{sys.executable}" -c "{program}"'
    for arguments, code in (("models >&- 2>&-", 0), ("generate m <&-", 2)):
        result = subprocess.run(["sh", "-c", f"{command} {arguments}"], capture_output=True, text=True, check=False)
        assert result.returncode == code, arguments
    assert "there is no prompt in standard input" in result.stderr


def test_characters_that_a_stream_does_not_know_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    monkeypatch.setattr("jaxllm.serving.cli_pull.run", lambda _: print(f"é {sys.stdin.read()}"))
    assert cli.main(["pull"]) == 0
    assert written.getvalue() == b"\\xe9 a\\udcff\n"


def test_flags_are_the_fields() -> None:
    command = parse_generate(
        "m", "first", "second prompt", "--max-model-len", "64", "--dtype", "float32", "--enforce-eager",
        "--no-compilation-cache", "--top-k", "-1", "--temperature", "0", "--max-tokens", "None", "--ignore-eos",
    )  # fmt: skip
    assert command.engine.make_config() == EngineConfig(
        "m", max_model_len=64, dtype="float32", enforce_eager=True, compilation_cache=False
    )
    assert command.sampling.make_params() == SamplingParams(top_k=-1, temperature=0.0, max_tokens=None, ignore_eos=True)
    assert command.prompts.texts == ("first", "second prompt")


def test_defaults_are_those_of_the_fields_but_for_the_length() -> None:
    command = parse_generate("m")
    assert command.engine.make_config() == EngineConfig("m")
    assert command.sampling.make_params() == SamplingParams(max_tokens=256)
    assert command.files.chat is False
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
    assert command.prompts.texts == ("prompt",)


def test_prompt_that_looks_like_a_flag() -> None:
    assert parse_generate("m", "--", "--x").prompts.texts == ("--x",)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_has_every_field(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = show_help(capsys, command)
    names = [item.name for kind in (EngineConfig, SamplingParams) for item in dataclasses.fields(kind)]
    for name in set(names) - {"model", "output_kind"}:
        assert "--" + name.replace("_", "-") in text
    assert "MODEL" in text
    assert "--sampling-seed" in text
    assert "a power of two" in " ".join(text.split()), "the help is the field's docstring"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_is_sorted_into_topics(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    titles = re.findall(r"^(?:╭─)? (.*) options\b", show_help(capsys, command), re.MULTILINE)
    assert titles == [*(["input and output"] if command == "generate" else []), *SAMPLING_TOPICS, *ENGINE_TOPICS]


def test_help_has_defaults_and_never_none(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(re.sub("│", " ", show_help(capsys, "generate")).split())
    assert "the smaller the more bytes a token takes. (default: 16)" in text
    assert "--max-tokens INT|None Most tokens to generate; None is up to max_model_len. (default: 256)" in text
    assert "--tokenizer STR Folder or hub id to take the tokenizer from; by default the model's own. --" in text
    assert "default: None" not in text


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_text_of_a_field_says_what_none_is(kind: type) -> None:
    docs = get_docs(kind)
    for item in dataclasses.fields(kind):
        assert docs[item.name].endswith(".")
        if item.default is None:
            assert re.search("by default|instead of", docs[item.name]), f"{item.name}: help does not show its default"


def test_topics_have_to_begin_at_fields() -> None:
    with pytest.raises(AssertionError, match="do not exist"):
        by_topic(SamplingParams, {"sampling": "temperature", "stopping": "max_token"})
    with pytest.raises(AssertionError, match="begins with temperature, which is in no topic"):
        by_topic(SamplingParams, {"stopping": "max_tokens"})


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_can_be_parsed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    match = re.search(rf"^Example: jaxllm ({command}.*)$", show_help(capsys, command), re.MULTILINE)
    assert match
    assert type(cli.parse(match[1].split())).__name__.lower() == command


def test_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    text = show_help(capsys)
    assert "Exit codes: 0 done" in text
    for command in COMMANDS:
        assert f"• {command} " in text


def test_help_is_fast_because_nothing_heavy_is_imported() -> None:
    code = "import sys; from jaxllm.serving import cli; cli.parse(['pull']); print({'jax', 'numpy'} & {*sys.modules})"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"
    assert time.perf_counter() - started < 10, "about 0.5 s on an idle machine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "generate"),
        (["frobnicate"], "frobnicate"),
        (["generate"], "MODEL"),
        (["generate", "m", "hi", "--blok-size", "3"], "--block-size"),
        (["generate", "m", "hi", "--dtype", "int3"], "bfloat16"),
        (["generate", "m", "hi", "--top-k", "many"], "--top-k"),
        (["generate", "m", "hi", "--output-format", "xml"], "jsonl"),
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
        (["pull", "nowhere"], "error: model='nowhere' is not known"),
    ],
)
def test_wrong_value(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", "nowhere", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_command: Pull) -> None:
        raise error

    monkeypatch.setattr("jaxllm.serving.cli_pull.run", fail)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("a wrong value"), 2),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 2),
        (DownloadError("no network"), 1),
        (FileNotFoundError(2, "No such file"), 1),
        (BrokenPipeError(), 1),
        (AssertionError("a broken invariant"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_drop_output", lambda: None)
    fail_with(error, monkeypatch)
    assert cli.main(["pull"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_bug_is_called_one_and_fits_on_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(RuntimeError("\n\n".join(f"line {number}" for number in range(500))), monkeypatch)
    assert cli.main(["pull"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: RuntimeError: line 0\nline 1\n")
    assert "it is a bug of jaxllm" in message
    assert len(message.splitlines()) < 20
    assert cli.main(["pull", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")])
def test_lack_of_memory_is_not_a_bug(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(error, monkeypatch)
    assert cli.main(["pull"]) == 1
    message = capsys.readouterr().err
    assert "--max-model-len" in message
    assert "bug" not in message


def test_no_colours_in_files() -> None:
    """Terminals are in test_cli_terminal.py."""
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    code = "import sys; from jaxllm.serving.cli import main; sys.exit(main(['pull', 'nowhere']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.returncode == 2
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["generate", "--help"], ["--help"], ["pull"]])
def test_reader_that_stops_early_is_no_error(arguments: list[str]) -> None:
    """As in `jaxllm pull | head -0`; the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    code = f"import sys; from jaxllm.serving.cli import main; sys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_pull_lists_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out


def test_pull_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hub, "pull", lambda name: Path("/cache") / name)
    assert cli.main(["pull", "tiny"]) == 0
    assert capsys.readouterr().out == "/cache/tiny\n"
