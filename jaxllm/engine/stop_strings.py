"""Finding stop strings in text that arrives in pieces.

The invariant: the outcome depends on the text only, not on how it is cut into pieces. The stop string that is
completed first wins; of several completed by the same character, the one that begins first (the longest). The text
before it is shown, all of it; no part of it is shown before it is certain, so the longest end of the text that could be the
beginning of a stop string is held back. Held text is shorter than the longest stop string, and so is the work.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through up to the first stop string, or with `keep` to its end."""

    def __init__(self, stop: Sequence[str], keep: bool = False) -> None:
        self._stop = tuple(stop)
        self._keep = keep
        self._longest = max(map(len, self._stop), default=0)
        self._first_characters = frozenset(string[0] for string in self._stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found: the text ends there."""

    def append(self, text: str, may_stop: bool = True) -> str:
        """Add text; returns what can be shown. Stop strings that are completed while not `may_stop` are text."""
        if self.matched is not None:
            return ""
        num_searched = len(self._held)
        text = self._held + text
        if may_stop:
            start = self._search(text, num_searched)
            if start is not None:
                self._held = ""
                return text[: start + len(self.matched or "") * self._keep]
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """End the text; returns what was held: the beginning of a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str, num_searched: int) -> int | None:
        """Where the winning stop string begins, of those that end after the characters already searched."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, self.matched = min(found)
        return start

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop string, and not a whole one."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters and self._is_beginning(text[start:]):
                return len(text) - start
        return 0

    def _is_beginning(self, end: str) -> bool:
        return any(len(stop) > len(end) and stop.startswith(end) for stop in self._stop)
