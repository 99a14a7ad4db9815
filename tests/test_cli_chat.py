"""`jaxllm chat`: a conversation that survives Ctrl-C, mistakes and forgetting."""

import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving import cli, cli_chat
from jaxllm.serving.cli_chat_commands import COMMANDS, EXIT
from jaxllm.serving.cli_params import NAMES

Messages = Sequence[dict[str, str]]


class FakeTokenizer:
    """Its token ids are indices into the conversations it was given."""

    has_chat_template = True

    def __init__(self) -> None:
        self.conversations: list[Messages] = []

    def encode_chat(self, messages: Messages) -> list[int]:
        self.conversations.append(list(messages))
        return [len(self.conversations) - 1]


class FakeEngine:
    """Answers with the words of the last message, one a step; `on_step` may do harm in between."""

    def __init__(self, on_step: Callable[[str], None] = lambda word: None) -> None:
        self.tokenizer = FakeTokenizer()
        self.aborted: list[str] = []
        self.params: list[SamplingParams] = []
        self._on_step = on_step
        self._requests: dict[str, Iterator[RequestOutput]] = {}

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        text = self.tokenizer.conversations[prompt[0]][-1]["content"]
        if len(text) > 40:
            raise ValueError("the prompt is too long: shorten it")
        self.params.append(params)
        self._requests[request_id] = self._answer(request_id, text.split())

    def _answer(self, request_id: str, words: list[str]) -> Iterator[RequestOutput]:
        for index, word in enumerate(words):
            self._on_step(word)
            reason = None if index < len(words) - 1 else "length" if word == "cut" else "stop"
            completion = CompletionOutput(0, " ".join(words[: index + 1]), [0] * (index + 1), 0.0, reason)
            yield RequestOutput(request_id, None, [0], [completion], reason is not None)

    def step(self) -> list[RequestOutput]:
        outputs = [next(answer) for answer in self._requests.values()]
        for done in [one.request_id for one in outputs if one.finished]:
            del self._requests[done]
        return outputs

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)
        del self._requests[request_id]

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)


def chat(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, lines: str, *arguments: str) -> int:
    monkeypatch.setattr(cli_chat, "LLMEngine", lambda **fields: engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return cli.main(["chat", "m", *arguments])


def test_chat_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert chat(monkeypatch, engine, "how are you\n\nfine\n", "--system", "Be kind.") == 0
    assert capsys.readouterr().out == "how are you\nfine\n"
    assert engine.tokenizer.conversations[-1] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "how are you"},
        {"role": "assistant", "content": "how are you"},
        {"role": "user", "content": "fine"},
    ]


def test_chat_streams(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    engine = FakeEngine(lambda word: seen.append(capsys.readouterr().out))
    chat(monkeypatch, engine, "one two three\n")
    assert seen == ["", "one", " two"]


def test_chat_reset_and_exit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert chat(monkeypatch, engine, "one\n/reset\ntwo\n/exit\nthree\n", "--system", "s") == 0
    assert [len(messages) for messages in engine.tokenizer.conversations] == [2, 2]
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\n"
    assert captured.err == "The conversation is forgotten.\n"


def test_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chat(monkeypatch, FakeEngine(), "/help\n")
    text = capsys.readouterr().err
    for name in (*COMMANDS, EXIT):
        assert f"\n{name} " in f"\n{text}"
    assert max(map(len, text.splitlines())) <= 60, "it is not wrapped on a narrow terminal"


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("/sytem Be kind.", "error: /sytem is not a command: did you mean '/system'?"),
        ("/x", "error: /x is not a command: use one of /system, /params, /reset, /help, /exit"),
        ("/params temprature=1", "error: 'temprature' is not a sampling parameter: did you mean 'temperature'?"),
        ("/params temperature=hot", "error: temperature='hot' is not valid: use 0 (greedy) or above"),
        ("/params temperature=-1", "error: temperature=-1 is not valid: use 0 (greedy) or above"),
        ("/params temperature", "error: 'temperature' is not a name and a value: write temperature=0.7, for example"),
        ("/params top_k=5 top_p=2", "error: top_p=2 is not valid: use above 0"),
        ("/params stop='a", "error: No closing quotation"),
    ],
)
def test_command_with_a_mistake_changes_nothing(
    line: str, note: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    chat(monkeypatch, engine, f"{line}\nhi\n")
    assert engine.params == [SamplingParams(max_tokens=512)]
    assert capsys.readouterr().err.startswith(note)
    assert len(engine.tokenizer.conversations[0]) == 1


def test_params_are_set_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    words = """temperature=0.5 seed=3 stop=END max_tokens=None ignore_eos=True stop_token_ids=[1,2]"""
    chat(monkeypatch, engine, f'hi\n/params {words}\nhi\n/params stop=\'["a b", "c"]\'\n/params\n', "--top-p", "0.9")
    changed = SamplingParams(
        temperature=0.5, seed=3, stop=("END",), max_tokens=None, ignore_eos=True, stop_token_ids=(1, 2), top_p=0.9
    )
    assert engine.params == [SamplingParams(max_tokens=512, top_p=0.9), changed]
    notes = capsys.readouterr().err.splitlines()
    shown = ["temperature=0.5", "seed=3", 'stop=["END"]', "max_tokens=None", "ignore_eos=true", "stop_token_ids=[1, 2]"]
    assert notes[: len(shown)] == shown, "after a change, what was changed"
    assert notes[len(shown)] == 'stop=["a b", "c"]'
    assert len(notes) == len(shown) + 1 + len(NAMES), "without a change, everything"


def test_system_is_set_shown_and_taken_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    chat(monkeypatch, engine, '/system\n/system Be "kind".\none\n/system Be brief.\n/system\ntwo\n/system ""\nthree\n')
    assert capsys.readouterr().err.splitlines() == [
        "There are no instructions.",
        'Instructions: Be "kind".',
        "Instructions: Be brief.",
        "Instructions: Be brief.",
        "There are no instructions.",
    ]
    first, second, third = engine.tokenizer.conversations
    assert first[0] == {"role": "system", "content": 'Be "kind".'}
    assert second[0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert [message["role"] for message in third] == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize("line", [" /reset", "/usr/bin is a folder", "a /reset"])
def test_message_with_a_slash(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    chat(monkeypatch, engine, f"{line}\n")
    assert engine.tokenizer.conversations == [[{"role": "user", "content": line.strip()}]]


def test_backslash_continues_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    chat(monkeypatch, engine, "one\\\n  two\\\n\nthree\\\n")
    assert [messages[-1]["content"] for messages in engine.tokenizer.conversations] == ["one\n  two"]


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("interrupt", "shown"),
    [
        pytest.param(lambda: signal.raise_signal(signal.SIGINT), "one two", id="signal"),
        pytest.param(raise_interrupt, "one", id="exception"),
    ],
)
def test_interrupt_stops_the_answer_and_not_the_chat(
    interrupt: Callable[[], None], shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal waits for the end of the step, so the second word still comes."""
    handler = signal.getsignal(signal.SIGINT)
    engine = FakeEngine(lambda word: interrupt() if word == "two" else None)
    assert chat(monkeypatch, engine, "one two three\nfour\n") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{shown}\nfour\n"
    assert "(stopped)" in captured.err
    assert engine.aborted == ["chat-1"]
    assert engine.tokenizer.conversations[-1][1] == {"role": "assistant", "content": shown}
    assert signal.getsignal(signal.SIGINT) is handler


def test_second_interrupt_does_not_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_twice(word: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the step went on")

    engine = FakeEngine(interrupt_twice)
    assert chat(monkeypatch, engine, "one two\n") == 0
    assert engine.aborted == ["chat-1"]


def test_turn_stopped_before_any_text_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(lambda word: raise_interrupt() if word == "one" else None)
    chat(monkeypatch, engine, "one\ntwo\n")
    assert engine.tokenizer.conversations[-1] == [{"role": "user", "content": "two"}]


def test_interrupt_at_the_prompt_does_not_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Keyboard(io.StringIO):
        pressed = False

        def readline(self, size: int | None = -1, /) -> str:
            if not self.pressed:
                self.pressed = True
                raise KeyboardInterrupt
            return super().readline(-1)

    engine = FakeEngine()
    monkeypatch.setattr(cli_chat, "LLMEngine", lambda **fields: engine)
    monkeypatch.setattr(sys, "stdin", Keyboard("hi\n"))
    assert cli.main(["chat", "m"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hi\n"
    assert "Ctrl-D or /exit leaves" in captured.err


def test_failed_turn_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert chat(monkeypatch, engine, f"{'long ' * 20}\nshort\n") == 0
    captured = capsys.readouterr()
    assert "error: the prompt is too long: shorten it (/reset forgets the conversation)" in captured.err
    assert engine.tokenizer.conversations[-1] == [{"role": "user", "content": "short"}]


def test_message_that_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert chat(monkeypatch, engine, "\udcff\nfine\n") == 0
    assert "is no character" in capsys.readouterr().err
    assert engine.tokenizer.conversations[-1] == [{"role": "user", "content": "fine"}]


def test_answer_that_reached_its_limit_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(monkeypatch, FakeEngine(), "it is cut\n")
    assert "max_tokens=N" in capsys.readouterr().err


def test_chat_needs_a_chat_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.tokenizer.has_chat_template = False
    assert chat(monkeypatch, engine, "hi\n") == 2
    assert "has no chat template" in capsys.readouterr().err
