"""The stream's concatenation is what decoding everything at once gives, whatever the token ids are."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from toy_tokenizers import PIECES, byte_fallback, byte_level, gemma_decoder, get_id, words

from jaxllm.engine.detokenizer import MAX_HELD_BYTES, MAX_UNFINISHED_TOKENS, IncrementalDetokenizer, TextVocabulary
from jaxllm.engine.tokenizer import Tokenizer

BYTE_LEVEL = byte_level()
BYTE_LEVEL_IN_SEQUENCE = byte_level(decoders.Sequence([decoders.ByteLevel()]))
LLAMA = byte_fallback()
GEMMA = byte_fallback(gemma_decoder())
METASPACE = byte_fallback(decoders.Metaspace())
TOYS = {
    "byte-level": BYTE_LEVEL,
    "byte-level in a sequence": BYTE_LEVEL_IN_SEQUENCE,
    "llama": LLAMA,
    "gemma": GEMMA,
    "metaspace": METASPACE,
    "no decoder": byte_fallback(decoders.Sequence([])),
    "words": words(),
    "word pieces": words(decoders.WordPiece()),
}
AWKWARD_BYTES = [0x0A, 0x20, 0x41, 0x80, 0xA0, 0xBD, 0xC3, 0xA9, 0xE4, 0xED, 0xEF, 0xBF, 0xF0, 0x9F, 0x99, 0x82, 0xFF]


WITHOUT_SPACES = {"skip_special_tokens": False, "spaces_between_special_tokens": False}


def start(toy: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(TextVocabulary(toy, skip_special_tokens), prompt_ids)


def stream(
    toy: Tokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    """The texts of the tokens, and what the end added."""
    detokenizer = start(toy, prompt_ids, skip_special_tokens)
    return [*(detokenizer.append([token_id]) for token_id in ids), detokenizer.flush()]


def any_ids(toy: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Token ids up to some beyond the vocabulary; half of them such as are the most trouble together."""
    offset = 0 if toy in (BYTE_LEVEL, BYTE_LEVEL_IN_SEQUENCE) else 1
    awkward = st.sampled_from([byte + offset for byte in AWKWARD_BYTES])
    end = toy.vocab_size
    return st.lists(st.one_of(st.integers(0, end + 5), awkward, st.integers(max(end - 20, 0), end + 2)), max_size=40)


def longest_byte_run(toy: Tokenizer, ids: Sequence[int]) -> int:
    longest = length = 0
    for token_id in ids:
        token = toy.id_to_token(token_id)
        if token is None or token_id in toy.special_ids:
            continue
        length = length + 1 if token.startswith("<0x") else 0
        longest = max(longest, length)
    return longest


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", TOYS)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_stream_equals_decoding_at_once(name: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    toy = TOYS[name]
    ids = data.draw(any_ids(toy))
    assume(longest_byte_run(toy, ids) <= MAX_HELD_BYTES)
    whole = toy.decode(ids, skip_special_tokens)
    pieces = stream(toy, ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == whole


def join_at_once(toy: Tokenizer, ids: Sequence[int]) -> str:
    """What tokens are without spaces between added ones: cut where one follows another, decoded, and put together."""
    added, parts, previous = toy.added_tokens, [], None
    for token_id in ids:
        if toy.id_to_token(token_id) is None:
            continue
        if not parts or (token_id in added and previous in added):
            parts.append([])
        parts[-1].append(token_id)
        previous = token_id
    texts = [toy.decode(part, skip_special_tokens=False) for part in parts]
    heads = [toy.decode(part[:1], skip_special_tokens=False) for part in parts]
    rest = list(zip(parts, texts, heads, strict=True))[1:]
    assert all(text.startswith(head) for _, text, head in rest)
    return "".join([*texts[:1], *(added[part[0]] + text[len(head) :] for part, text, head in rest)])


@pytest.mark.parametrize("name", TOYS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_spaces_between_added_tokens(name: str, data: st.DataObject) -> None:
    """One token or several at a time; the same as with spaces where the decoder puts none."""
    toy = TOYS[name]
    vocabulary = TextVocabulary(toy, **WITHOUT_SPACES)
    added = st.lists(st.sampled_from(sorted(toy.added_tokens)), min_size=1, max_size=4)
    ids = [one for part in data.draw(st.lists(any_ids(toy) | added, max_size=5)) for one in part]
    assume(longest_byte_run(toy, ids) <= MAX_HELD_BYTES)
    whole = join_at_once(toy, ids)
    one_by_one, portions = (IncrementalDetokenizer(vocabulary, ()) for _ in range(2))
    assert "".join(one_by_one.append([one]) for one in ids) + one_by_one.flush() == whole
    assert vocabulary.text(ids) == whole
    cut = data.draw(st.integers(0, len(ids)))
    assert portions.append(ids[:cut]) + portions.append(ids[cut:]) + portions.flush() == whole
    if not isinstance(toy.backend.decoder, decoders.WordPiece | None):
        assert whole == toy.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("toy", [TOYS["words"], TOYS["word pieces"]], ids=["words", "word pieces"])
def test_only_the_space_between_added_tokens_is_left_out(toy: Tokenizer) -> None:
    names = ["a", "<s>", "</s>", "<tool>", "b", "<s>", "hello", "</s>", "<s>"]
    ids = [get_id(toy, name) for name in names]
    assert toy.decode(ids, skip_special_tokens=False) == " ".join(names)
    assert TextVocabulary(toy, **WITHOUT_SPACES).text(ids) == "a <s></s><tool> b <s> hello </s><s>"
    skipping = TextVocabulary(toy, spaces_between_special_tokens=False)
    assert skipping.text(ids) == toy.decode(ids) == "a <tool> b hello"
    # As in vLLM, what counts is the answer: the prompt's last token is none of its tokens.
    behind_prompt = IncrementalDetokenizer(TextVocabulary(toy, **WITHOUT_SPACES), ids[:2])
    assert behind_prompt.append(ids[2:4]) == " </s><tool>"


@pytest.mark.parametrize("name", TOYS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_every_answer_that_ends_earlier_is_whole_as_well(name: str, data: st.DataObject) -> None:
    toy = TOYS[name]
    ids = data.draw(any_ids(toy))
    assume(longest_byte_run(toy, ids) <= MAX_HELD_BYTES)
    for end in range(len(ids) + 1):
        assert "".join(stream(toy, ids[:end])) == toy.decode(ids[:end])


@pytest.mark.parametrize("name", TOYS)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_many_tokens_at_once_give_the_same_text(name: str, data: st.DataObject) -> None:
    """Also where that is not what decoding everything gives: after a run of bytes that is too long to be held."""
    toy = TOYS[name]
    portions = data.draw(st.lists(any_ids(toy), max_size=4))
    if data.draw(st.booleans()):
        portions.append([*toy.encode("ཀ" * MAX_HELD_BYTES), toy.backend.token_to_id("<0xFF>") or 0xFF])
    prompt_ids = data.draw(st.lists(st.integers(0, toy.vocab_size), max_size=2))
    detokenizer = start(toy, prompt_ids)
    single = start(toy, prompt_ids)
    for portion in portions:
        assert detokenizer.append(portion) == "".join(single.append([token_id]) for token_id in portion)
    assert detokenizer.flush() == single.flush()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_stream_goes_on_where_the_prompt_ended(data: st.DataObject) -> None:
    toy = data.draw(st.sampled_from([LLAMA, GEMMA, METASPACE]))
    pieces = st.sampled_from([get_id(toy, piece) for piece in PIECES])
    specials = st.lists(st.sampled_from(sorted(toy.special_ids)), max_size=2)
    prompt_ids = data.draw(st.lists(st.integers(0, toy.vocab_size), max_size=5))
    # Byte tokens at the border would be one unit with the answer's, and change the prompt's own text.
    prompt_ids += [data.draw(pieces), *data.draw(specials)]
    ids = data.draw(any_ids(toy))
    assume(longest_byte_run(toy, ids) <= MAX_HELD_BYTES)
    assert toy.decode(prompt_ids) + "".join(stream(toy, ids, prompt_ids)) == toy.decode([*prompt_ids, *ids])


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size), max_size=5), any_ids(BYTE_LEVEL))
@settings(deadline=None)
def test_prompt_does_not_matter_to_byte_level_tokenizers(prompt_ids: list[int], ids: list[int]) -> None:
    for toy in (BYTE_LEVEL, BYTE_LEVEL_IN_SEQUENCE):
        assert "".join(stream(toy, ids, prompt_ids)) == toy.decode(ids)


@pytest.mark.parametrize("make_text", [st.text, lambda: st.text("aé你🙂👩‍👩‍👧 \ufffd\n")])
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_text_comes_back(make_text: Callable[[], st.SearchStrategy[str]], data: st.DataObject) -> None:
    text = data.draw(make_text())
    assert "".join(stream(BYTE_LEVEL, BYTE_LEVEL.encode(text))) == text
    ids = LLAMA.encode(text)
    assert "".join(stream(LLAMA, ids)) == LLAMA.decode(ids)


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"hi", ["h", "i", ""]),
        ("é!".encode(), ["", "é", "!", ""]),
        ("你".encode(), ["", "", "你", ""]),
        (b"\xe4\xbd", ["", "", "\ufffd"]),
        (b"\xffa", ["", "\ufffda", ""]),
        (b"\xff\xff\xff", ["", "\ufffd", "\ufffd", "\ufffd"]),
        (b"\xe4\xbda", ["", "", "\ufffda", ""]),
        ("\ufffd".encode() + b"a", ["", "", "", "\ufffda", ""]),
        (b"\xe4\xbd\xe4\xbd\xa0", ["", "", "\ufffd", "", "你", ""]),
    ],
)
def test_text_comes_as_soon_as_it_is_certain(data: bytes, pieces: list[str]) -> None:
    """In the byte-level toy, the ids below 256 are the bytes."""
    assert stream(BYTE_LEVEL, list(data)) == pieces
    assert stream(BYTE_LEVEL_IN_SEQUENCE, list(data)) == pieces


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (["▁a", "▁b"], ["a", " b", ""]),
        (["<s>", "▁a", "</s>", "▁b"], ["", "a", "", " b", ""]),
        (["▁a", "<0xE4>", "<0xBD>", "<0xA0>", "b"], ["a", "", "", "", "你b", ""]),
        (["a", "<0x0A>", "▁b"], ["a", "", "\n b", ""]),
        (["a", "<0x0A>"], ["a", "", "\n"]),
        (["a", "<0x0A>", "<0xFF>", "<0x41>", "b"], ["a", "", "\ufffd\ufffd", "\ufffd", "b", ""]),
        (["<0x20>", "▁a"], ["", " a", ""]),
        (["a", "<0xE4>", "<0xBD>"], ["a", "", "", "\ufffd\ufffd"]),
    ],
)
def test_byte_tokens_wait_for_the_end_of_their_run(tokens: list[str], pieces: list[str]) -> None:
    assert stream(LLAMA, [get_id(LLAMA, token) for token in tokens]) == pieces


def test_long_byte_run_is_shown_in_parts() -> None:
    """Else nothing would stream in a script that the vocabulary lacks."""
    text = "ཀ" * MAX_HELD_BYTES
    ids = [get_id(LLAMA, f"<0x{byte:02X}>") for byte in text.encode()]
    pieces = stream(LLAMA, [*ids, get_id(LLAMA, "▁a")])
    assert "".join(pieces) == text + " a"
    longest_wait = max(len(wait) for wait in "".join("x" if piece else " " for piece in pieces).split("x"))
    assert longest_wait <= MAX_HELD_BYTES + 3


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    for toy in TOYS.values():
        ids = [toy.vocab_size + 1000, get_id(toy, "a"), toy.vocab_size]
        assert "".join(stream(toy, ids, prompt_ids=[toy.vocab_size])) == "a"


def test_characters_go_on_across_skipped_tokens() -> None:
    ids = [0xE4, get_id(BYTE_LEVEL, "</s>"), 0xBD, BYTE_LEVEL.vocab_size, 0xA0]
    assert stream(BYTE_LEVEL, ids) == ["", "", "", "", "你", ""]


class CountingTokenizer(Tokenizer):
    """Notes how many tokens each call of `decode` was given."""

    def __init__(self, toy: Tokenizer) -> None:
        super().__init__(toy.backend)
        self.sizes: list[int] = []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.sizes.append(len(ids))
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("toy", [BYTE_LEVEL, BYTE_LEVEL_IN_SEQUENCE, LLAMA])
@pytest.mark.parametrize("token", ["a", "broken"])
def test_work_does_not_grow_with_the_answer(toy: Tokenizer, token: str) -> None:
    broken = "<0xFF>" if toy is LLAMA else "ÿ"
    counting = CountingTokenizer(toy)
    detokenizer = start(counting, [get_id(counting, "a")] * 500)
    for _ in range(500):
        detokenizer.append([get_id(counting, broken if token == "broken" else token)])
    assert max(counting.sizes) <= MAX_UNFINISHED_TOKENS + 2
    assert len(counting.sizes) <= 2 * 500 + 10
