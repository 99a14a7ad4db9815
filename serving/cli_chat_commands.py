"""What can be typed in a chat besides messages: /help, /reset, /system, /params and /exit.

The invariant: a line is a command only if it begins with a slash and a word; with a space before it, it is a message.
A command with a mistake changes nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Protocol

from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.cli_flags import get_fields
from jaxllm.serving.cli_params import NAMES, change_params, parse_changes, suggest

EXIT = "/exit"
HELP = "/help lists the commands; Ctrl-C stops an answer; Ctrl-D or /exit leaves."

_COMMAND = re.compile(r"(/\w+)(?:\s+(.*))?", re.DOTALL)
_LONG_HELP = """\
/system TEXT   instructions for the next answers; "" is none
/params temperature=0.7 top_p=0.9   how answers are sampled
/reset         forget the conversation, not the instructions
/help          this list
/exit          leave, as Ctrl-D does
/system and /params alone show what holds.
Ctrl-C stops an answer.
A backslash at the end of a line continues the message.
Behind a space, a message may begin with a slash."""


class Settings(Protocol):
    """What commands can change about a conversation."""

    params: SamplingParams
    system: str | None

    def reset(self) -> None: ...


def run_command(line: str, conversation: Settings) -> str | None:
    """Execute a command; returns what to tell the user, or None if the line is a message.

    Raises:
        ValueError: there is no such command, or what follows it is wrong.
    """
    match = _COMMAND.fullmatch(line)
    if match is None:
        return None
    name, text = match[1], (match[2] or "").strip()
    if name not in COMMANDS:
        raise ValueError(f"{name} is not a command{suggest(name, [*COMMANDS, EXIT])}")
    return COMMANDS[name](conversation, text)


def _help(conversation: Settings, text: str) -> str:
    return _LONG_HELP


def _reset(conversation: Settings, text: str) -> str:
    conversation.reset()
    return "The conversation is forgotten."


def _system(conversation: Settings, text: str) -> str:
    if text:
        conversation.system = None if text in ('""', "''") else text
    return "There are no instructions." if conversation.system is None else f"Instructions: {conversation.system}"


def _params(conversation: Settings, text: str) -> str:
    changes = parse_changes(shlex.split(text))
    conversation.params = change_params(conversation.params, changes)
    values = get_fields(conversation.params)
    return "\n".join(f"{name}={_show(values[name])}" for name in changes or NAMES)


def _show(value: object) -> str:
    """A value as it can be typed."""
    return "None" if value is None else json.dumps(value, ensure_ascii=False)


COMMANDS: Mapping[str, Callable[[Settings, str], str]] = {
    "/system": _system,
    "/params": _params,
    "/reset": _reset,
    "/help": _help,
}
