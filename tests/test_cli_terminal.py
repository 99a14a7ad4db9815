"""What only a terminal shows: the prompt, editing with a history, and colours."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("readline")

READ_MESSAGES = """
from jaxllm.serving.cli_terminal import edit_lines, read_message
with edit_lines():
    while True:
        try:
            print(repr(read_message()))
        except EOFError:
            break
"""
UP = "\x1b[A"
CTRL_D = "\x04"


class Terminal:
    """A Python program with a terminal of its own."""

    def __init__(self, code: str, **variables: str) -> None:
        keep = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        self._main, ours = pty.openpty()
        environment = keep | {"TERM": "xterm-256color"} | variables
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=ours, stdout=ours, stderr=ours, env=environment, start_new_session=True
        )
        os.close(ours)
        self.shown = ""

    def type(self, keys: str, until: str) -> None:
        """Press keys, then wait for a text to be shown behind what was shown before."""
        start = len(self.shown)
        os.write(self._main, keys.encode())
        self.wait_for(until, start)

    def wait_for(self, text: str, start: int = 0) -> None:
        deadline = time.monotonic() + 60
        while text not in self.shown[start:]:
            assert time.monotonic() < deadline, f"{text!r} was not shown: {self.shown!r}"
            assert self._read(), f"{text!r} was not shown: {self.shown!r}"

    def end(self, keys: str = "") -> int:
        """Press keys and wait for the program's exit code."""
        os.write(self._main, keys.encode())
        while self._read():
            pass
        os.close(self._main)
        return self._process.wait(timeout=60)

    def _read(self) -> bool:
        try:
            data = os.read(self._main, 65536)
        except OSError:  # the program has ended
            return False
        self.shown += data.decode()
        return bool(data)


def test_history_reaches_the_next_conversation(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(cache), NO_COLOR="1")
    terminal.wait_for("> ")
    terminal.type("first\r", "'first'")
    terminal.type("second\r", "'second'")
    assert terminal.end(CTRL_D) == 0
    assert (cache / "chat-history").read_text() == "first\nsecond\n"
    assert (cache / "chat-history").stat().st_mode & 0o777 == 0o600, "nobody else's business"

    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(cache), NO_COLOR="1")
    terminal.wait_for("> ")
    terminal.type(f"{UP}{UP}!\r", "'first!'")
    assert terminal.end(CTRL_D) == 0


def test_paste_of_several_lines_is_one_message(tmp_path: Path) -> None:
    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(tmp_path))
    terminal.wait_for("> ")
    terminal.type("\x1b[200~one\ntwo\x1b[201~\r", r"'one\ntwo'")
    terminal.type("three \\\r", "... ")
    terminal.type("four\r", r"'three \nfour'")
    assert terminal.end(CTRL_D) == 0


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(tmp_path / "file"))
    terminal.wait_for("> ")
    terminal.type("hi\r", "'hi'")
    assert terminal.end(CTRL_D) == 0
    assert "the history was not kept" in terminal.shown


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
    ids=["terminal", "NO_COLOR", "dumb"],
)
def test_colours(variables: dict[str, str], coloured: bool, tmp_path: Path) -> None:
    for arguments in (["pull", "nowhere"], ["pull", "--x"]):
        terminal = Terminal(f"from jaxllm.serving import cli; cli.main({arguments})", **variables)
        terminal.end()
        assert ("\x1b[" in terminal.shown) is coloured

    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(tmp_path), **variables)
    terminal.wait_for("> ")
    assert ("\x1b[1;36m> " in terminal.shown) is coloured
    assert terminal.end(CTRL_D) == 0
