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
from collections.abc import Mapping, Sequence
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
    order = sorted(range(len(pieces)), key=lambda position: (-scores[position], position))
    ranks = {pieces[position]: rank for rank, position in enumerate(order)}
    pairs = (_last_pair(piece, ranks) for piece in ranks)
    return [pair for pair in pairs if pair is not None]


def _last_pair(piece: str, ranks: Mapping[str, int]) -> tuple[str, str] | None:
    """What the piece's own text consists of before the last join; None if that is not two pieces."""
    never = len(ranks)
    parts = list(piece)
    joins = [ranks.get(left + right, never) for left, right in itertools.pairwise(parts)]
    while len(joins) > 1:
        best = min(joins)
        if best == never:
            return None
        at = joins.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joins[at]
        if at > 0:
            joins[at - 1] = ranks.get(parts[at - 1] + parts[at], never)
        if at < len(joins):
            joins[at] = ranks.get(parts[at] + parts[at + 1], never)
    return (parts[0], parts[1]) if joins and ranks.keys() >= set(parts) else None


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
