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

    Signals reach the main thread only: in any other one the event is never set.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
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
