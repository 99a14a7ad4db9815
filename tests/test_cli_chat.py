"""`jaxllm chat`: a conversation that survives Ctrl-C, mistakes and forgetting."""

import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving import cli, cli_chat

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
    assert chat(monkeypatch, engine, "one\n/reset\n/help\ntwo\n/exit\nthree\n", "--system", "s") == 0
    assert [len(messages) for messages in engine.tokenizer.conversations] == [2, 2]
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\n"
    assert "/help is not a command" in captured.err


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
    assert "Ctrl-D leaves" in captured.err


def test_failed_turn_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert chat(monkeypatch, engine, f"{'long ' * 20}\nshort\n") == 0
    captured = capsys.readouterr()
    assert "error: the prompt is too long: shorten it" in captured.err
    assert engine.tokenizer.conversations[-1] == [{"role": "user", "content": "short"}]


def test_answer_that_reached_its_limit_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(monkeypatch, FakeEngine(), "it is cut\n")
    assert "--max-tokens" in capsys.readouterr().err


def test_chat_needs_a_chat_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.tokenizer.has_chat_template = False
    assert chat(monkeypatch, engine, "hi\n") == 2
    assert "has no chat template" in capsys.readouterr().err
