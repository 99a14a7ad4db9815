"""Reads the lines that a user types, with a prompt, editing and a history where there is a terminal.

The invariant: nothing is written to standard output when it is no terminal: it holds answers only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from rich.console import Console

from jaxllm.cache_dir import cache_dir

try:
    import readline
except ImportError:  # a Python that was built without it: lines cannot be edited
    readline: ModuleType | None = None

_MAX_HISTORY = 1000
_PROMPT, _CONTINUED = "> ", "... "
_COLOUR, _PLAIN = "\033[1;36m", "\033[0m"


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def read_message() -> str:
    """What the user says next; a backslash at the end of a line continues on the next one.

    Raises:
        EOFError: the input has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    lines = [_read_line(_PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_read_line(_CONTINUED))
    return "\n".join(lines).rstrip()


@contextmanager
def edit_lines() -> Iterator[None]:
    """Arrow keys reach what was typed before, in earlier conversations too, and a paste of several lines is one."""
    if readline is None or not is_interactive():
        yield
        return
    path = cache_dir() / "chat-history"
    readline.set_history_length(_MAX_HISTORY)
    readline.parse_and_bind("set enable-bracketed-paste on")
    try:
        readline.read_history_file(path)
    except OSError:  # none yet, or not readable: not worth a message
        readline.clear_history()
    try:
        yield
    finally:
        _save_history(path)


def _save_history(path: os.PathLike[str]) -> None:
    assert readline is not None, "no history was kept"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        readline.write_history_file(path)
    except OSError as error:
        print(f"the history was not kept in {path}: {error.strerror}", file=sys.stderr)


def _read_line(prompt: str) -> str:
    if not is_interactive():
        if sys.stdin.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
        return input()
    if Console().color_system is None or os.environ.get("NO_COLOR"):
        return input(prompt)
    if readline is None:
        return input(f"{_COLOUR}{prompt}{_PLAIN}")
    # The marks tell readline what takes no place on the line.
    return input(f"\001{_COLOUR}\002{prompt}\001{_PLAIN}\002")
