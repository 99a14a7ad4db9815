"""From token ids to outputs: text grows, ends exactly, and nothing comes after the end."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import byte_fallback, byte_level, get_id

from jaxllm.engine.output_processor import OutputProcessor, StoppedRequest
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import CompletionOutput, RequestOutput, TokenOutput
from jaxllm.request import FinishReason
from jaxllm.sampling_params import SamplingParams

TOY = byte_level()
"""Its ids below 256 are the bytes."""
END = get_id(TOY, "</s>")


def make(toy: Tokenizer = TOY, **params: object) -> OutputProcessor:
    """A processor with one request, "r"."""
    processor = OutputProcessor(toy)
    processor.add("r", "hello", [1, 2], SamplingParams(**params))  # pyright: ignore[reportArgumentType]
    return processor


def step(ids: Sequence[int], finish: str | None = None, stop_reason: int | None = None, name: str = "r") -> TokenOutput:
    return TokenOutput(name, tuple(ids), tuple(-0.5 for _ in ids), finish, stop_reason)


def run(processor: OutputProcessor, *steps: TokenOutput) -> list[CompletionOutput]:
    outputs = [output for token_output in steps for output in processor.process([token_output])[0]]
    return [output.outputs[0] for output in outputs]


def test_outputs_hold_everything_so_far() -> None:
    processor = make()
    first, second = run(processor, step(b"he"), step(b"y", "length"))
    assert first == CompletionOutput(0, "he", [*b"he"], -1.0)
    assert second == CompletionOutput(0, "hey", [*b"hey"], -1.5, "length")
    assert type(second.finish_reason) is str


def test_request_output_names_the_prompt() -> None:
    processor = OutputProcessor(TOY)
    processor.add("a", "hello", (1, 2), SamplingParams())
    processor.add("b", None, (3,), SamplingParams())
    outputs, stopped = processor.process([step(b"x", name="b"), step(b"y", "length", name="a")])
    assert outputs == [
        RequestOutput("b", None, [3], [CompletionOutput(0, "x", [*b"x"], -0.5)], finished=False),
        RequestOutput("a", "hello", [1, 2], [CompletionOutput(0, "y", [*b"y"], -0.5, "length")], finished=True),
    ]
    assert stopped == []


@pytest.mark.parametrize(("token", "stop_reason"), [(END, None), (ord("!"), ord("!"))])
def test_text_of_the_token_that_ended_it_is_not_shown(token: int, stop_reason: int | None) -> None:
    *_, last = run(make(), step(b"hi"), step([token], "stop", stop_reason))
    assert last == CompletionOutput(0, "hi", [*b"hi", token], -1.5, "stop", stop_reason)


def test_several_tokens_of_one_step_the_last_of_which_ends_it() -> None:
    (last,) = run(make(), step(b"a!b!", FinishReason.STOP, ord("!")))
    assert last == CompletionOutput(0, "a!b", [*b"a!b!"], -2.0, "stop", ord("!"))


def test_held_text_comes_at_the_end() -> None:
    data = "你".encode()
    held, last = run(make(stop=["abc"]), step(b"xab" + data[:2]), step(data[:1], "length"))
    assert held.text == "x", "the beginning of a stop string and of a character are held"
    assert last.text == "xab\ufffd\ufffd"
    assert last.finish_reason == "length"


def test_stop_string_ends_the_request() -> None:
    processor = make(stop=["END", "\n"])
    outputs, stopped = processor.process([step(b"a E")])
    assert (outputs[0].outputs[0].text, stopped) == ("a ", [])
    outputs, stopped = processor.process([step(b"ND more")])
    assert outputs[0].outputs[0] == CompletionOutput(0, "a ", [*b"a END"], -2.5, "stop", "END")
    assert outputs[0].finished
    assert stopped == [StoppedRequest("r", "END")]


def test_tokens_after_a_stop_string_are_dropped() -> None:
    processor = make(stop=["!"])
    processor.process([step(b"hi!")])
    assert processor.process([step(b"more"), step(b"x", "length")]) == ([], [])


def test_core_is_not_told_to_abort_what_it_finished() -> None:
    outputs, stopped = make(stop=["!"]).process([step(b"hi!", "length")])
    assert outputs[0].outputs[0] == CompletionOutput(0, "hi", [*b"hi!"], -1.5, "stop", "!")
    assert stopped == []


def test_stop_string_completed_by_held_text_at_the_end() -> None:
    (last,) = run(make(stop=["\ufffd"]), step(b"a\xff", "length"))
    assert (last.text, last.finish_reason, last.stop_reason) == ("a", "stop", "\ufffd")


def test_stop_string_of_byte_tokens() -> None:
    toy = byte_fallback()
    ids = [get_id(toy, token) for token in ("▁a", "<0x0A>", "</s>")]
    *_, last = run(make(toy, stop=["\n"]), step(ids[:2]), step(ids[2:], "stop"))
    assert (last.text, last.stop_reason) == (" a", "\n")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ""), (2, "a.b"), (3, "a.b"), (4, "a.b.c")])
def test_min_tokens_come_before_a_stop_string(min_tokens: int, text: str) -> None:
    *_, last = run(make(stop=["a.", "."], min_tokens=min_tokens), *(step([byte]) for byte in b"a.b.c."))
    assert last.text == text
    assert last.finish_reason == "stop"


def test_abort_shows_what_was_held() -> None:
    processor = make(stop=["xyz"])
    run(processor, step(b"a xy"))
    output = processor.abort("r")
    assert output is not None and output.finished
    assert output.outputs[0] == CompletionOutput(0, "a xy", [*b"a xy"], -2.0, "abort")
    assert processor.abort("r") is None
    assert processor.process([step(b"late")]) == ([], [])


def test_abort_before_the_first_token() -> None:
    output = make().abort("r")
    assert output is not None
    assert output.outputs[0] == CompletionOutput(0, "", [], 0.0, "abort")


def test_unfinished_request_id_cannot_be_used_again() -> None:
    processor = make()
    with pytest.raises(ValueError, match="request_id='r'"):
        processor.add("r", None, [1], SamplingParams())
    processor.abort("r")
    processor.add("r", None, [1], SamplingParams())


def test_earlier_outputs_do_not_change() -> None:
    processor = make()
    first = run(processor, step(b"a"))[0]
    run(processor, step(b"b"))
    assert first.token_ids == [*b"a"]


def decode_certain(ids: Sequence[int]) -> str:
    """The text of ids as far as no token behind them can change it."""
    return TOY.decode(ids).removesuffix("\ufffd")


def cut(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            return text[: end - len(max(found, key=len))], max(found, key=len)
    return text, None


def expect(ids: Sequence[int], stop: Sequence[str]) -> CompletionOutput:
    """By decoding everything: the whole answer, cut at a stop string."""
    text, matched = cut(TOY.decode(ids), stop)
    num_tokens = len(ids)
    if matched is not None:
        ends = (end for end in range(1, len(ids)) if cut(decode_certain(ids[:end]), stop)[1] is not None)
        num_tokens = next(ends, len(ids))
    reason = "length" if matched is None else "stop"
    return CompletionOutput(0, text, list(ids[:num_tokens]), -0.5 * num_tokens, reason, matched)


TEXT = "aé你🙂\ufffd"
BYTES = sorted(set(TEXT.encode()))
token_ids = st.one_of(st.sampled_from(BYTES), st.integers(256, TOY.vocab_size + 2), st.just(END))


@given(
    st.lists(st.one_of(st.lists(token_ids, max_size=4), st.text(TEXT, max_size=2).map(TOY.encode)), min_size=1),
    st.lists(st.text(TEXT, min_size=1, max_size=3), max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_answer_is_the_whole_text_cut(steps: list[list[int]], stop: list[str]) -> None:
    processor = make(stop=stop)
    answers = run(processor, *map(step, steps[:-1]), step(steps[-1], "length"))
    assert answers[-1] == expect([token_id for ids in steps for token_id in ids], stop)
    for earlier, later in itertools.pairwise(answers):
        assert later.text.startswith(earlier.text)
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
