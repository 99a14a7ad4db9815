"""Merges from scores: the same pieces for every text as SentencePiece's own rule, and what is kept on disk."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, models

from jaxllm.cache_dir import cache_dir
from jaxllm.engine import tokenizer_merges
from jaxllm.engine.tokenizer_merges import derive_merges, merges_of

PIECES = ["a", "b", "ab", "aba", "abab"]
SCORES = [-9.0, -8.0, 0.0, -1.0, -2.0]


def join_by_score(text, scores):
    """SentencePiece's rule, word for word: the best neighbours first, of equals the leftmost."""
    parts = list(text)
    while True:
        joins = [(scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joins:
            return parts
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def draw_vocabulary(rng):
    """Pieces of few letters, so that they overlap, with scores in any order."""
    letters = rng.choice(["ab", "abc"])
    joined = ["".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(rng.randint(1, 14))]
    pieces = list(dict.fromkeys([*letters, *joined]))
    return pieces, [-float(score) for score in rng.sample(range(len(pieces)), len(pieces))]


def encode_by_merges(pieces, scores, text):
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocab, derive_merges(pieces, scores))).encode(text).tokens


@pytest.mark.parametrize("seed", range(300))
def test_merges_do_what_scores_do(seed):
    rng = random.Random(seed)
    pieces, scores = draw_vocabulary(rng)
    for _ in range(10):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 6)))
        expected = join_by_score(text, dict(zip(pieces, scores, strict=True)))
        assert encode_by_merges(pieces, scores, text) == expected, (pieces, scores)


def test_a_piece_is_made_of_one_pair():
    assert derive_merges(PIECES, SCORES) == [("a", "b"), ("ab", "a"), ("ab", "ab")]


def test_pieces_of_equal_score_come_in_the_order_of_the_vocabulary():
    assert derive_merges(["a", "b", "ba", "ab"], [0.0] * 4) == [("b", "a"), ("a", "b")]


def test_pieces_that_no_text_ends_up_with():
    # "abb" is never made, as "ab" goes first and "b" "b" makes nothing; "xa" has a letter that is no piece.
    assert derive_merges(["a", "b", "ba", "abab", "xa"], [0.0, 0.0, -1.0, -2.0, -3.0]) == [("b", "a")]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_merges, "_WORTH_STORING_SECONDS", -1)
    return cache_dir() / "tokenizers"


def test_merges_are_kept(cache, monkeypatch):
    first = merges_of(PIECES, SCORES)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(tokenizer_merges, "derive_merges", lambda *args: pytest.fail("derived again"))
    assert merges_of(PIECES, SCORES) == first == [("a", "b"), ("ab", "a"), ("ab", "ab")]


def test_another_vocabulary_has_merges_of_its_own(cache):
    merges_of(PIECES, SCORES)
    assert merges_of(PIECES, [-9.0, -8.0, -1.0, 0.0, -2.0]) == [("ab", "a"), ("a", "b"), ("aba", "b")]
    assert merges_of(PIECES[:3], SCORES[:3]) == [("a", "b")]
    assert len(list(cache.iterdir())) == 3


def test_no_merges_are_kept_too(cache):
    assert merges_of(["a"], [0.0]) == []
    assert merges_of(["a"], [0.0]) == []


def test_quick_ones_are_not_kept(cache, monkeypatch):
    monkeypatch.setattr(tokenizer_merges, "_WORTH_STORING_SECONDS", 1000)
    merges_of(PIECES, SCORES)
    assert not cache.exists()


def test_damaged_ones_are_derived_again(cache):
    expected = merges_of(PIECES, SCORES)
    (file,) = cache.iterdir()
    for content in (b"", b"nonsense", file.read_bytes()[:-3]):
        file.write_bytes(content)
        assert merges_of(PIECES, SCORES) == expected


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tokenizer_merges, "_WORTH_STORING_SECONDS", -1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "file"))
    assert merges_of(PIECES, SCORES) == derive_merges(PIECES, SCORES)
    assert "cannot store the merges" in caplog.text
