"""Stop strings in a stream end it exactly where they end the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.stop_strings import StopStringMatcher


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By definition: the first stop string to be completed, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            winner = max(found, key=len)
            return text[: end - len(winner)], winner
    return text, None


def without_beginnings(text: str, stop: list[str]) -> str:
    """By definition: the text without its longest end that a stop string begins with."""
    for start in range(len(text)):
        if any(len(string) > len(text) - start and string.startswith(text[start:]) for string in stop):
            return text[:start]
    return text


pieces_of_text = st.lists(st.text("ab", max_size=4), max_size=12)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(pieces_of_text, stop_strings)
def test_outcome_is_that_of_the_whole_text(pieces: list[str], stop: list[str]) -> None:
    matcher = StopStringMatcher(stop)
    shown = "".join(map(matcher.append, pieces)) + matcher.flush()
    assert (shown, matcher.matched) == cut("".join(pieces), stop)


@given(pieces_of_text, stop_strings)
def test_everything_is_shown_but_a_possible_beginning(pieces: list[str], stop: list[str]) -> None:
    matcher = StopStringMatcher(stop)
    text = shown = ""
    for piece in pieces:
        shown += matcher.append(piece)
        text += piece
        if matcher.matched is not None:
            break
        assert shown == without_beginnings(text, stop)


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "matched"),
    [
        pytest.param(["END"], ["one E", "N", "D two"], ["one ", "", ""], "END", id="spans pieces"),
        pytest.param(["END"], ["one END two"], ["one "], "END", id="inside a piece"),
        pytest.param(["END"], ["one ", "END"], ["one ", ""], "END", id="is a piece"),
        pytest.param(["END"], ["END"], [""], "END", id="is everything"),
        pytest.param(["END"], ["E", "E", "EN", "E", "nd"], ["", "E", "E", "EN", "End"], None, id="never comes"),
        pytest.param(["b", "abc"], ["abc"], ["a"], "b", id="the first completed wins, not the first to begin"),
        pytest.param(["c", "bc"], ["abc"], ["a"], "bc", id="of two completed together the longer wins"),
        pytest.param(["ab", "abc"], ["abc"], [""], "ab", id="one begins with another"),
        pytest.param(["aab"], ["aa", "aab"], ["", "aa"], "aab", id="overlaps itself"),
        pytest.param(["\n\n"], ["x\n", "y\n", "\nz"], ["x", "\ny", ""], "\n\n", id="newlines"),
        pytest.param(["é!"], ["né", "!"], ["n", ""], "é!", id="multi-byte characters"),
        pytest.param([], ["a", "b"], ["a", "b"], None, id="no stop string"),
    ],
)
def test_pieces(stop: list[str], pieces: list[str], shown: list[str], matched: str | None) -> None:
    matcher = StopStringMatcher(stop)
    assert [matcher.append(piece) for piece in pieces] == shown
    assert matcher.matched == matched


def test_nothing_comes_after_a_stop_string() -> None:
    matcher = StopStringMatcher(["x"])
    assert matcher.append("axb") == "a"
    assert matcher.append("c") == ""
    assert matcher.flush() == ""


def test_stop_strings_are_text_while_the_answer_may_not_stop() -> None:
    matcher = StopStringMatcher(["abc", "b"])
    assert matcher.append("ab", may_stop=False) == ""
    assert matcher.append("c", may_stop=True) == ""
    assert matcher.matched == "abc", "completed in time; the b inside of it was not"


def test_stop_string_completed_too_early_is_shown() -> None:
    matcher = StopStringMatcher(["ab"])
    assert matcher.append("xaba", may_stop=False) == "xab"
    assert matcher.append("ca") == "ac"
    assert matcher.append("b") == ""
    assert matcher.matched == "ab"


def test_a_stop_string_can_be_kept():
    for cut in range(8):
        matcher = StopStringMatcher(["ENDS", "END"], keep=True)
        text = "an END of it"
        assert matcher.append(text[:cut]) + matcher.append(text[cut:]) == "an END" and matcher.matched == "END"
