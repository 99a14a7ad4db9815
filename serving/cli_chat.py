"""`jaxllm chat`: a conversation in the terminal, each answer printed as it is made.

The invariant: Ctrl-C never ends the program and never hits the engine in the middle of a step: it is noted, and the
answer is aborted after the step. The conversation holds exactly what was said and shown; a turn that failed, or
was stopped before anything was shown, leaves no trace in it.
"""

from __future__ import annotations

from rich.console import Console

from jaxllm import LLMEngine
from jaxllm.engine.interrupts import note_interrupt
from jaxllm.request import FinishReason
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.cli_chat_commands import EXIT, HELP, run_command
from jaxllm.serving.cli_commands import Chat
from jaxllm.serving.cli_flags import get_fields
from jaxllm.serving.cli_input import check_text
from jaxllm.serving.cli_terminal import edit_lines, is_interactive, read_message

LENGTH_NOTE = "(cut at its length limit; /params max_tokens=N raises it, up to the model's longest text)"


def run(command: Chat) -> None:
    config = command.engine.make_config()
    params = command.sampling.make_params()
    with LLMEngine(**get_fields(config)) as engine:
        if not engine.tokenizer.has_chat_template:
            raise ValueError(
                f"model={config.model!r} has no chat template: use `jaxllm generate`, or a model tuned for conversations"
            )
        with edit_lines():
            talk(Conversation(engine, params, command.system))


def talk(conversation: Conversation) -> None:
    """Read lines and answer them until the user leaves."""
    notes = Console(stderr=True, highlight=False, style="dim", markup=False)
    if is_interactive():
        notes.print(HELP)
    while (line := _read(notes)) != EXIT:
        try:
            _take(line, conversation, notes)
        except ValueError as error:
            notes.print(f"error: {error}", style="red", soft_wrap=True)


def _read(notes: Console) -> str:
    """What was typed; `/exit` at the end of the input."""
    while True:
        try:
            return read_message()
        except EOFError:
            if is_interactive():
                notes.print()
            return EXIT
        except KeyboardInterrupt:
            notes.print(f"\n{HELP}")


def _take(line: str, conversation: Conversation, notes: Console) -> None:
    """Execute a command or answer a message; an empty line is neither."""
    if (reply := run_command(line, conversation)) is not None:
        notes.print(reply)
    elif message := line.strip():
        finish_reason = conversation.answer(message)
        if finish_reason == FinishReason.ABORT:
            notes.print("(stopped)")
        elif finish_reason == FinishReason.LENGTH:
            notes.print(LENGTH_NOTE)


class Conversation:
    """The messages so far, the instructions before them, and the engine that continues them."""

    def __init__(self, engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._engine = engine
        self._num_requests = 0

    def reset(self) -> None:
        self.messages = []

    def answer(self, text: str) -> str | None:
        """Print the answer to a message as it is made; returns why it ended.

        Raises:
            ValueError: the conversation is too long for the model, or the message is no text.
        """
        check_text(text)
        instructions = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*self.messages, {"role": "user", "content": text}]
        self._num_requests += 1
        request_id = f"chat-{self._num_requests}"
        prompt = self._engine.tokenizer.encode_chat([*instructions, *messages])
        try:
            self._engine.add_request(request_id, prompt, self.params)
        except ValueError as error:
            raise ValueError(f"{error} (/reset forgets the conversation)") from error
        answer, finish_reason = self._stream(request_id)
        if answer or finish_reason != FinishReason.ABORT:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        return finish_reason

    def _stream(self, request_id: str) -> tuple[str, str | None]:
        """Step until the request is finished or the user stops it; returns the text shown and why it ended."""
        shown = ""
        finish_reason: str | None = None
        with note_interrupt() as interrupted:
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
