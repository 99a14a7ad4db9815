"""`jaxllm chat`: a conversation in the terminal, each answer printed as it is made.

The invariant: Ctrl-C never ends the program and never hits the engine in the middle of a step: it is noted, and the
answer is aborted after the step. The conversation holds exactly what was said and shown; a turn that failed, or
was stopped before anything was shown, leaves no trace in it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from jaxllm import LLMEngine
from jaxllm.request import FinishReason
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.cli_commands import Chat, get_fields

HELP = "/reset forgets the conversation; /exit or Ctrl-D leaves; Ctrl-C stops an answer."


def run(command: Chat) -> None:
    config = command.engine.make_config()
    params = command.sampling.make_params()
    with LLMEngine(**get_fields(config)) as engine:
        if not engine.tokenizer.has_chat_template:
            raise ValueError(
                f"model={config.model!r} has no chat template: use `jaxllm generate`, or a model tuned for conversations"
            )
        talk(Conversation(engine, params, command.system))


def talk(conversation: Conversation) -> None:
    """Read lines and answer them until the user leaves."""
    notes = Console(stderr=True, highlight=False, style="dim", markup=False)
    if sys.stdin.isatty():
        notes.print(HELP)
    while (line := _read_line(notes)) != "/exit":
        if line == "/reset":
            conversation.reset()
            notes.print("The conversation is forgotten.")
        elif line.startswith("/") and " " not in line:
            notes.print(f"{line} is not a command. {HELP}")
        elif line:
            _take_turn(conversation, line, notes)


def _read_line(notes: Console) -> str:
    """The next line, stripped; `/exit` at the end of the input."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            return Console().input("[bold cyan]>[/] " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                notes.print()
            return "/exit"
        except KeyboardInterrupt:
            notes.print(f"\n{HELP}")


def _take_turn(conversation: Conversation, line: str, notes: Console) -> None:
    try:
        finish_reason = conversation.answer(line)
    except ValueError as error:
        notes.print(f"error: {error}", style="red", soft_wrap=True)
        return
    if finish_reason == FinishReason.ABORT:
        notes.print("(stopped)")
    elif finish_reason == FinishReason.LENGTH:
        notes.print("(the answer reached its length limit: --max-tokens, or the model's longest text)")


class Conversation:
    """The messages so far, and the engine that continues them."""

    def __init__(self, engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._num_requests = 0
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = list(self._system)

    def answer(self, text: str) -> str | None:
        """Print the answer to a message as it is made; returns why it ended.

        Raises:
            ValueError: the conversation is too long for the model.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        self._num_requests += 1
        request_id = f"chat-{self._num_requests}"
        self._engine.add_request(request_id, self._engine.tokenizer.encode_chat(messages), self._params)
        answer, finish_reason = self._stream(request_id)
        if answer or finish_reason != FinishReason.ABORT:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        return finish_reason

    def _stream(self, request_id: str) -> tuple[str, str | None]:
        """Step until the request is finished or the user stops it; returns the text shown and why it ended."""
        shown = ""
        finish_reason: str | None = None
        with _note_interrupt() as interrupted:
            try:
                while not interrupted.is_set() and self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        if output.request_id == request_id:  # and not an answer that was stopped before
                            shown = _show(output.outputs[0].text, shown)
                            finish_reason = output.outputs[0].finish_reason
            except KeyboardInterrupt:
                interrupted.set()
            if interrupted.is_set() and finish_reason is None:
                self._engine.abort_request(request_id)
                finish_reason = FinishReason.ABORT
        print(flush=True)
        return shown, finish_reason


def _show(text: str, shown: str) -> str:
    """Print what was added to a text; returns the whole of it."""
    print(text[len(shown) :], end="", flush=True)
    return text


@contextmanager
def _note_interrupt() -> Iterator[threading.Event]:
    """Sets the event on the first Ctrl-C; another one, if the step hangs, raises KeyboardInterrupt."""
    interrupted = threading.Event()

    def note(_signal: int, _frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
