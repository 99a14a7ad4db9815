"""The merges of a vocabulary that has scores instead: what SentencePiece does, said as byte pair encoding.

SentencePiece joins the two neighbours whose piece has the highest score, the leftmost first; the `tokenizers`
library joins the pair that comes first in a list. A piece that a text ends up with was put together inside its own
characters, as if it stood alone, so each piece has exactly one pair that it is ever made of. That pair is the one
listed here, and with it both ways give the same pieces for every text.
Invariant: merges are derived once for a vocabulary; deleting what is stored costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxllm.cache_dir import cache_dir

logger = logging.getLogger(__name__)

_WORTH_STORING_SECONDS = 0.5
_RULES = "1"
"""To be changed with the rules by which merges are found, as stored ones would be used otherwise."""


def merges_of(pieces: list[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of pieces to join, the most urgent first; kept in the cache folder if they took long to find."""
    file = cache_dir() / "tokenizers" / f"{_fingerprint(pieces, scores)}.npy"
    merges = _load(file, pieces)
    if merges is None:
        start = time.perf_counter()
        merges = derive_merges(pieces, scores)
        if time.perf_counter() - start > _WORTH_STORING_SECONDS:
            _save(file, pieces, merges)
    return merges


def derive_merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of pieces to join, the most urgent first.

    Pieces of equal score count in the order of the vocabulary: that is the order in which a file without real
    scores lists them. A piece that no text ends up with has no pair.
    """
    history = _History(piece for piece in pieces if len(piece) == 1)
    everything = set(pieces)
    waiting: dict[str, list[str]] = {}
    """Pieces by a part of theirs that has a lower score than they have: once it is there, they are next."""
    joined = [position for position, piece in enumerate(pieces) if len(piece) > 1]
    for position in sorted(joined, key=lambda position: (-scores[position], position)):
        turns = [pieces[position]]
        for piece in turns:
            if history.try_to_add(piece):
                turns += waiting.pop(piece, ())
            elif piece not in history.numbers:
                for part in _missing_parts(piece, history.numbers, everything):
                    waiting.setdefault(part, []).append(piece)
    return history.merges


class _History:
    """Which two pieces each piece is made of. A piece's number says when it comes to be."""

    def __init__(self, characters: Iterable[str]):
        self.numbers = {character: number for number, character in enumerate(characters)}
        self.merges: list[tuple[str, str]] = []
        self._num_characters = len(self.numbers)
        self._parts: dict[int, tuple[int, int]] = {}
        self._made: dict[tuple[int, int], int] = {}
        """The reverse of _parts."""

    def try_to_add(self, piece: str) -> bool:
        """Adds the piece if it can be made now of two that are there."""
        if piece in self.numbers:
            return False
        for cut in range(1, len(piece)):
            left, right = self.numbers.get(piece[:cut]), self.numbers.get(piece[cut:])
            if left is not None and right is not None and self._meet(left, right):
                number = len(self.numbers)
                self._parts[number] = left, right
                self._made[left, right] = number
                self.numbers[piece] = number
                self.merges.append((piece[:cut], piece[cut:]))
                return True
        return False

    def _meet(self, left: int, right: int) -> bool:
        """Whether the two, one after the other in a text, both come to be.

        Goes back in time, taking apart the one that came later. What stood at either side of the border at any
        time must not have become a piece across it.
        """
        now = len(self.numbers)
        while self._made.get((left, right), now) >= now:
            if left < self._num_characters and right < self._num_characters:
                return True
            if left > right:
                now = left
                left = self._parts[left][1]
            else:
                # A pair that makes the very same piece further to the left has the right of way.
                now = right + 1
                right = self._parts[right][0]
        return False


def _missing_parts(piece: str, present: Mapping[str, int], everything: set[str]) -> list[str]:
    """Parts that the piece could be made of later on."""
    halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
    possible = [pair for pair in halves if everything.issuperset(pair)]
    return [part for part in dict.fromkeys(itertools.chain(*possible)) if part not in present]


def _fingerprint(pieces: Sequence[str], scores: Sequence[float]) -> str:
    digest = hashlib.sha256(_RULES.encode())
    digest.update("\0".join(pieces).encode())
    digest.update(np.asarray(scores, np.float32).tobytes())
    return digest.hexdigest()[:32]


def _load(file: Path, pieces: list[str]) -> list[tuple[str, str]] | None:
    if not file.exists():
        return None
    try:
        lefts, rights = np.load(file, allow_pickle=False).tolist()
        return [(pieces[left], pieces[right]) for left, right in zip(lefts, rights, strict=True)]
    except (OSError, ValueError, EOFError, IndexError, TypeError) as error:
        logger.warning("stored merges %s are unreadable, deriving them again: %s", file, error)
        return None


def _save(file: Path, pieces: list[str], merges: list[tuple[str, str]]) -> None:
    """Writes positions in `pieces`, atomically; failing to write costs the next start time, nothing else."""
    positions = {piece: position for position, piece in enumerate(pieces)}
    table = np.array([[positions[pair[side]] for pair in merges] for side in (0, 1)], np.int32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as out:
            np.save(out, table)
        os.replace(out.name, file)
    except OSError as error:
        logger.warning("cannot store the merges %s: %s", file, error)
