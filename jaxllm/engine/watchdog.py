"""Notices that somebody who has work to do shows no sign of life.

Invariants: no time is counted in which this event loop itself stood still, so that a signal that waits to be read is
never taken for a missing one. Nothing runs while there is no work. Work that was taken back, as nothing came of it, is
no reason to stop looking: those who give up sooner than this does must not hide that nobody is there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

MAX_PERIOD = 1.0
"""Seconds between two looks, at most."""


class Watchdog:
    """Calls back once after `timeout` seconds without a sign of life.

    Args:
        has_work: whether one is due.
        ask: called where work was taken back before a sign came; gives some that brings one.
        on_silence: called once; then the watch is over.
    """

    def __init__(
        self, timeout: float, has_work: Callable[[], bool], ask: Callable[[], None], on_silence: Callable[[], None]
    ) -> None:
        self._period = min(timeout / 4, MAX_PERIOD)
        self._most_silent_looks = math.ceil(timeout / self._period)
        self._has_work = has_work
        self._ask = ask
        self._on_silence = on_silence
        self._silent_looks = 0
        self._is_heard = False
        """There was a sign since the watch began, or since the last look."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """There is work from now on."""
        if self._timer is None:
            self._silent_looks, self._is_heard = 0, False
            self._wait()

    def note_life(self) -> None:
        self._silent_looks, self._is_heard = 0, True

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period, self._look)

    def _look(self) -> None:
        self._timer = None
        self._silent_looks += 1
        has_work = self._has_work()
        if not has_work and self._is_heard:
            return
        if self._silent_looks > self._most_silent_looks:
            self._on_silence()
            return
        self._is_heard = False
        self._wait()
        if not has_work:
            self._ask()
