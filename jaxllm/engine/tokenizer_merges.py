"""The merges of a vocabulary that has scores instead: what SentencePiece does, said as byte pair encoding.

SentencePiece joins the two neighbours whose piece has the highest score, the leftmost first; the `tokenizers`
library joins the pair that comes first in a list. A piece that a text ends up with was put together inside its own
characters, as if it stood alone, so each piece has exactly one pair that it is ever made of. That pair is the one
listed here, and with it both ways give the same pieces for every text.
Invariant: merges are derived once for a vocabulary; deleting what is stored costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jaxllm.cache_dir import cache_dir

logger = logging.getLogger(__name__)

_WORTH_STORING_SECONDS = 0.5
_RULES = "1"
"""To be changed with the rules by which merges are found, as stored ones would be used otherwise."""


def merges_of(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of pieces to join, the most urgent first; kept in the cache folder if they took long to find."""
    file = cache_dir() / "tokenizers" / f"{_fingerprint(pieces, scores)}.npy"
    pairs = _load(file, len(pieces))
    if pairs is None:
        start = time.perf_counter()
        pairs = derive_merges(pieces, scores)
        if time.perf_counter() - start > _WORTH_STORING_SECONDS:
            _save(file, pairs)
    lefts, rights = pairs.T.tolist()
    return [(pieces[left], pieces[right]) for left, right in zip(lefts, rights, strict=True)]


def derive_merges(pieces: Sequence[str], scores: Sequence[float]) -> np.ndarray:
    """Pairs of positions in `pieces`, [merges, 2], the most urgent first.

    Pieces of equal score count in the order of the vocabulary: that is the order in which a file without real
    scores lists them. A piece that no text ends up with has no pair.
    """
    order = _order(pieces, scores)
    numbers = {pieces[position]: number for number, position in enumerate(order)}
    history = _History(sum(len(piece) == 1 for piece in numbers), len(order))
    number_of = numbers.get
    for piece, number in numbers.items():
        for cut in range(1, len(piece)):
            # What a piece is made of came to be before it: that is how scores are given in training.
            if (right := number_of(piece[cut:], number)) == number or (left := number_of(piece[:cut], number)) == number:
                continue
            if left < number and right < number and history.meet(left, right):
                history.add(number, left, right)
                break
    made = np.fromiter((number for pair in history.made for number in pair), np.int32).reshape(-1, 2)
    return np.asarray(order, np.int32)[made]


class _History:
    """Which two pieces each piece is made of. Pieces are numbers: the order in which they come to be."""

    def __init__(self, num_characters: int, count: int):
        self.made: dict[tuple[int, int], int] = {}
        """What pairs become, in the order of what they become."""
        self._num_characters = num_characters
        self._count = count
        self._parts: dict[int, tuple[int, int]] = {}

    def add(self, number: int, left: int, right: int) -> None:
        self.made[left, right] = number
        self._parts[number] = left, right

    def meet(self, left: int, right: int) -> bool:
        """Whether the two, one after the other in a text, both come to be.

        Goes back in time, taking apart the one that came later. What stood at either side of the border at any
        time must not have become a piece across it.
        """
        now = self._count
        while self.made.get((left, right), now) >= now:
            latest = max(left, right)
            if latest < self._num_characters:
                return True
            if latest not in self._parts:
                return False  # It never comes to be.
            if left > right:
                now = left
                left = self._parts[left][1]
            else:
                # A pair that makes the very same piece further to the left has the right of way.
                now = right + 1
                right = self._parts[right][0]
        return False


def _order(pieces: Sequence[str], scores: Sequence[float]) -> list[int]:
    """Positions of the pieces as they come to be: characters, which the text has, then by falling score."""
    return sorted(range(len(pieces)), key=lambda position: (len(pieces[position]) > 1, -scores[position], position))


def _cuts(piece: str, numbers: dict[str, int]) -> Iterable[tuple[int, int]]:
    for cut in range(1, len(piece)):
        right = numbers.get(piece[cut:])
        left = None if right is None else numbers.get(piece[:cut])
        if left is not None and right is not None:
            yield left, right


def _fingerprint(pieces: Sequence[str], scores: Sequence[float]) -> str:
    digest = hashlib.sha256(_RULES.encode())
    digest.update("\0".join(pieces).encode())
    digest.update(np.asarray(scores, np.float32).tobytes())
    return digest.hexdigest()[:32]


def _load(file: Path, count: int) -> np.ndarray | None:
    if not file.exists():
        return None
    try:
        pairs = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        logger.warning("stored merges %s are unreadable, deriving them again: %s", file, error)
        return None
    is_whole = pairs.ndim == 2 and pairs.shape[1] == 2 and 0 <= pairs.min(initial=0) <= pairs.max(initial=0) < count
    return pairs if is_whole else None


def _save(file: Path, pairs: np.ndarray) -> None:
    """Writes atomically; failing to write costs the next start time, nothing else."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as out:
            np.save(out, pairs)
        os.replace(out.name, file)
    except OSError as error:
        logger.warning("cannot store the merges %s: %s", file, error)
