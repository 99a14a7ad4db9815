"""Where an engine runs: in a process of its own, or in a thread.

Invariant: an engine gets one end of a socket and ends when the other one is closed, so that it never stays behind.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Protocol

MODULE = "jaxllm.engine.engine_process"


class Launched(Protocol):
    """An engine that was launched."""

    pid: int
    """Of the process it runs in."""

    def kill(self) -> None:
        """End it now, as far as that is possible."""
        ...

    def join(self, timeout: float) -> str:
        """Wait for its end, and kill it if that takes more than `timeout` seconds; how it ended, for a message.

        Takes twice the timeout at most.
        """
        ...


class EngineProcess:
    """A new process.

    It is a program of its own, not a copy of this one and not a second run of its main module: nothing of this process
    (threads, locks, files) can be in its way, and scripts need no `if __name__ == "__main__"`. It is in a process
    group of its own, so that Ctrl-C does not reach it.

    Args:
        end: its end of the socket, which is closed here.
    """

    def __init__(self, end: socket.socket) -> None:
        level = logging.getLogger("jaxllm").getEffectiveLevel()
        command = [sys.executable, "-P", "-m", MODULE, *map(str, (end.fileno(), os.getpid(), level))]
        # It finds the modules that this process finds.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with end:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environment, pass_fds=(end.fileno(),), process_group=0
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float) -> str:
        for end in (self._process.kill, lambda: None):
            try:
                code = self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                end()
            else:
                return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"its exit code is {code}"
        return "it does not end, although it was killed"


class EngineThread:
    """A thread of this process, for debugging; it cannot be killed.

    Args:
        end: its end of the socket, which it closes.
    """

    def __init__(self, end: socket.socket) -> None:
        self.pid = os.getpid()
        self._thread = threading.Thread(target=_run, args=(end,), name="jaxllm engine", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        pass

    def join(self, timeout: float) -> str:
        self._thread.join(timeout)
        return "its thread goes on" if self._thread.is_alive() else "its thread ended"


def _run(end: socket.socket) -> None:
    # Imported only here: a process whose engine runs elsewhere does without JAX.
    importlib.import_module(MODULE).run_engine(end)
