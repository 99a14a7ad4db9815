"""Ctrl-C that waits for the end of a step: an engine interrupted in the middle of one would be of no more use."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def note_interrupt() -> Iterator[threading.Event]:
    """Sets the event on the first Ctrl-C; another one, if a step hangs, raises KeyboardInterrupt.

    Signals reach the main thread only: in any other one the event is never set. Nor is it where Ctrl-C is ignored, as
    in a job that a script put into the background.
    """
    interrupted = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):  # None: not Python's to restore
        yield interrupted
        return

    def note(_signal: int, _frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
