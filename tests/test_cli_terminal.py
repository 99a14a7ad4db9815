"""What only a terminal shows: the prompt, editing with a history, and colours."""

import os
import pty
import re
import select
import subprocess
import sys
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
COLOUR = re.compile(r"\x1b\[(\d+;)*[39][0-7]m")
MAX_SECONDS = 60


class Terminal:
    """A Python program with a terminal of its own."""

    def __init__(self, code: str, **variables: str) -> None:
        keep = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        self.keyboard, ours = pty.openpty()
        environment = keep | {"TERM": "xterm-256color"} | variables
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=ours, stdout=ours, stderr=ours, env=environment, start_new_session=True
        )
        os.close(ours)
        self.shown = ""
        self._seen = 0

    def say(self, keys: str, reply: str) -> None:
        """Press keys when the program waits for them, then wait for what it replies."""
        self.wait_for("> ")
        os.write(self.keyboard, keys.encode())
        self.wait_for(reply)

    def wait_for(self, text: str) -> None:
        """Wait until a text is shown behind the last one that was waited for."""
        while text not in self.shown[self._seen :]:
            assert self._read(), f"{text!r} was not shown: {self.shown[self._seen :]!r}"
        self._seen = self.shown.index(text, self._seen) + len(text)

    def leave(self) -> int:
        """Press Ctrl-D when the program waits for a line; returns its exit code."""
        self.wait_for("> ")
        os.write(self.keyboard, b"\x04")
        return self.end()

    def end(self) -> int:
        """Wait for the end of the program; returns its exit code."""
        while self._read():
            pass
        os.close(self.keyboard)
        return self._process.wait(timeout=MAX_SECONDS)

    def _read(self) -> bool:
        """Take what is shown next; whether there was something."""
        ready, _, _ = select.select([self.keyboard], [], [], MAX_SECONDS)
        if not ready:
            self._process.kill()
            pytest.fail(f"nothing happened after {self.shown!r}")
        try:
            data = os.read(self.keyboard, 65536)
        except OSError:  # the program has ended
            return False
        self.shown += data.decode()
        return bool(data)


def test_history_reaches_the_next_conversation(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(cache), NO_COLOR="1")
    terminal.say("first\r", "'first'")
    terminal.say("second\r", "'second'")
    assert terminal.leave() == 0
    assert (cache / "chat-history").read_text() == "first\nsecond\n"
    assert (cache / "chat-history").stat().st_mode & 0o777 == 0o600, "nobody else's business"

    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(cache), NO_COLOR="1")
    terminal.say(f"{UP}{UP}!\r", "'first!'")
    assert terminal.leave() == 0


def test_paste_of_several_lines_is_one_message(tmp_path: Path) -> None:
    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(tmp_path))
    terminal.say("\x1b[200~one\ntwo\x1b[201~\r", r"'one\ntwo'")
    terminal.say("three \\\r", "... ")
    os.write(terminal.keyboard, b"four\r")
    terminal.wait_for(r"'three \nfour'")
    assert terminal.leave() == 0


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(tmp_path / "file"))
    terminal.say("hi\r", "'hi'")
    assert terminal.leave() == 0
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
        assert bool(COLOUR.search(terminal.shown)) is coloured

    terminal = Terminal(READ_MESSAGES, JAXLLM_CACHE=str(tmp_path), **variables)
    assert terminal.leave() == 0
    assert bool(COLOUR.search(terminal.shown)) is coloured
