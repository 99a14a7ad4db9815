"""How many steps a call does on the device: one, unless the host cannot keep up with the device.

More steps a call cost latency: their tokens come together, and who arrives waits for all of them.
Invariant: the tokens are the same whatever is chosen.
"""

from __future__ import annotations

READS_BEFORE_FEWER = 256
"""Reads in a row that waited for the device, after which fewer steps are tried again."""


class StepPacer:
    """Doubles the steps of a call when a result lay ready, that is, when the device had to wait."""

    def __init__(self, max_steps: int):
        self.num_steps = 1
        self._max_steps = max_steps
        self._num_waits = 0

    def note_read(self, was_ready: bool) -> None:
        """A result was asked for, and the device was done with it already or not."""
        self._num_waits = 0 if was_ready else self._num_waits + 1
        if was_ready:
            self.num_steps = min(2 * self.num_steps, self._max_steps)
        elif self._num_waits == READS_BEFORE_FEWER:
            self.num_steps, self._num_waits = max(self.num_steps // 2, 1), 0
