"""What the log shows: `JAXLLM_LOG=debug`, or whatever the program that uses this one has set up.

All messages go to loggers below "jaxllm". Invariants: a level that somebody set on that logger is never changed; no
line is written twice: what is set up here is silent where the program has handlers of its own.
"""

from __future__ import annotations

import logging
import os

VARIABLE = "JAXLLM_LOG"
LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_logger = logging.getLogger("jaxllm")


class _LastResort(logging.StreamHandler):
    """Writes to standard error, unless a handler of the program gets the message, too."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def get_level(default: str) -> str:
    """The level that JAXLLM_LOG names, or the default.

    Raises:
        ValueError: it names none.
    """
    asked = os.environ.get(VARIABLE) or default
    if asked.lower() not in LEVELS:
        raise ValueError(f"{VARIABLE}={asked!r} is not a level: use one of {', '.join(LEVELS)}")
    return asked.lower()


def set_up_log() -> None:
    """Heeds JAXLLM_LOG; without it, the log is what Python makes of it: warnings on standard error.

    Raises:
        ValueError: it names no level.
    """
    if VARIABLE not in os.environ or _logger.level != logging.NOTSET:
        return
    _logger.setLevel(get_level("warning").upper())
    handler = _LastResort()
    handler.setFormatter(logging.Formatter(FORMAT))
    _logger.addHandler(handler)
