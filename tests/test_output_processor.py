"""From token ids to outputs: text grows, ends exactly, and nothing comes after the end."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from toy_tokenizers import byte_fallback, byte_level, get_id

from jaxllm.engine.output_processor import OutputProcessor, StoppedRequest
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput, TokenDetails, TokenIds, TokenOutput
from jaxllm.request import FinishReason
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

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
    processor.add("a", "hello", [1, 2], SamplingParams())
    processor.add("b", None, [3], SamplingParams())
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
    first = run(processor, step(b"ab"))[0]
    last = run(processor, step(b"c", "length"))[0]
    assert first.token_ids == [*b"ab"] and last.token_ids == [*b"abc"]
    assert type(last.token_ids) is list


def test_token_ids_are_a_list_that_does_not_grow() -> None:
    source = [5, 6, 7, 8]
    ids = TokenIds(source)
    source.append(9)
    assert ids == [5, 6, 7, 8] and ids == TokenIds([5, 6, 7, 8])
    assert ids != [5, 6, 7, 8, 9] and ids != (5, 6, 7, 8)
    assert (len(ids), list(ids), repr(ids)) == (4, [5, 6, 7, 8], "[5, 6, 7, 8]")
    assert (ids[0], ids[-1], ids[1:], ids[::-2], ids[2:99]) == (5, 8, [6, 7, 8], [8, 6], [7, 8])
    assert 9 not in ids and ids.index(7) == 2
    with pytest.raises(IndexError):
        ids[4]


def test_delta_outputs_hold_what_is_new() -> None:
    data = "é".encode()
    processor = make(output_kind=RequestOutputKind.DELTA)
    answers = run(processor, step(b"a"), step(data[:1]), step(data[1:] + b"b"), step([END], "stop"))
    assert answers == [
        CompletionOutput(0, "a", [*b"a"], -0.5),
        CompletionOutput(0, "", [*data[:1]], -1.0),
        CompletionOutput(0, "éb", [*data[1:], *b"b"], -2.0),
        CompletionOutput(0, "", [END], -2.5, "stop"),
    ]


def test_final_only_has_one_output() -> None:
    processor = make(output_kind=RequestOutputKind.FINAL_ONLY)
    assert processor.process([step(b"a"), step("é".encode()[:1])]) == ([], [])
    (last,) = run(processor, step("é".encode()[1:] + bytes([ord("!")]), "stop", ord("!")))
    assert last == CompletionOutput(0, "aé", [*"aé!".encode()], -2.0, "stop", ord("!"))


def test_final_only_makes_no_text_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make(output_kind=RequestOutputKind.FINAL_ONLY)
    with monkeypatch.context() as patch:
        patch.setattr(TOY, "decode", None)
        processor.process([step(b"ab")])
    output = processor.abort("r")
    assert output is not None and output.outputs[0] == CompletionOutput(0, "ab", [*b"ab"], -1.0, "abort")


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_without_detokenizing_there_is_no_text(kind: RequestOutputKind) -> None:
    *_, last = run(make(detokenize=False, output_kind=kind), step(b"ab"), step(b"c", "length"))
    new = b"c" if kind is RequestOutputKind.DELTA else b"abc"
    assert last == CompletionOutput(0, "", [*new], -1.5, "length")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"output_kind": "delta"}, "output_kind='delta' is not valid: use a RequestOutputKind"),
        ({"detokenize": None}, "detokenize=None is not valid: use True or False"),
        ({"detokenize": False, "stop": "x"}, r"stop=\('x',\) needs text: leave detokenize=True"),
    ],
)
def test_mistakes_are_named(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)  # pyright: ignore[reportArgumentType]


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


@given(
    st.lists(st.one_of(st.lists(token_ids, max_size=4), st.text(TEXT, max_size=2).map(TOY.encode)), min_size=1),
    st.lists(st.text(TEXT, min_size=1, max_size=3), max_size=2),
    st.sampled_from(["length", "stop", "abort"]),
)
@settings(max_examples=200, deadline=None)
def test_every_kind_of_output_ends_with_the_same_answer(steps: list[list[int]], stop: list[str], reason: str) -> None:
    assume(steps[-1] or reason != "stop")

    def run_as(kind: RequestOutputKind) -> list[CompletionOutput]:
        processor = make(stop=stop, output_kind=kind)
        answers = run(processor, *map(step, steps[:-1]))
        if reason != "abort":
            return [*answers, *run(processor, step(steps[-1], reason))]
        aborted = processor.abort("r")
        return answers if aborted is None else [*answers, *aborted.outputs]

    cumulative, delta, final = map(run_as, RequestOutputKind)
    assert final == cumulative[-1:]
    assert "".join(answer.text for answer in delta) == final[0].text
    assert [token_id for answer in delta for token_id in answer.token_ids] == final[0].token_ids
    assert delta[-1].finish_reason == final[0].finish_reason
    assert len(delta) == len(cumulative)


@pytest.mark.parametrize(("token", "shown"), [(END, "hi</s>"), (ord("!"), "hi!")])
def test_the_text_of_stop_tokens_can_be_kept(token: int, shown: str) -> None:
    kept = make(include_stop_str_in_output=True, skip_special_tokens=False)
    *_, last = run(kept, step(b"hi"), step([token], "stop", token))
    assert last.text == shown
    *_, skipped = run(make(include_stop_str_in_output=True), step(b"hi"), step([token], "stop", token))
    assert skipped.text == ("hi" if token == END else shown), "special tokens are skipped all the same"


def test_stop_strings_can_be_kept() -> None:
    processor = make(stop=["END"], include_stop_str_in_output=True)
    outputs, stopped = processor.process([step(b"a EN"), step(b"D of")])
    assert [output.outputs[0].text for output in outputs] == ["a ", "a END"]
    assert outputs[-1].outputs[0].token_ids == [*b"a END"] and stopped == [StoppedRequest("r", "END")]


def detailed(ids: Sequence[int], finish: str | None = None, top: Sequence[int] = (), prompt: Sequence[int] = ()):
    """A step with details, in which every token has the logprob -1, rank 2, and `top` as the most likely ones."""
    output = step(ids, finish)
    one = TokenDetails(-1.0, 2, list(top), [-0.1 * (1 + index) for index in range(len(top))])
    output.new_details = [one] * len(ids)
    output.prompt_details = [one] * len(prompt) or None
    return output


def test_logprobs_have_the_token_first_and_each_token_once() -> None:
    (last,) = run(make(logprobs=2), detailed(b"a", "length", top=[ord("b"), ord("a")]))
    assert last.logprobs == [{ord("a"): Logprob(-1.0, 2, "a"), ord("b"): Logprob(-0.1, 1, "b")}]
    (special,) = run(make(logprobs=0), detailed([END], "stop"))
    assert special.logprobs == [{END: Logprob(-1.0, 2, "</s>")}]


def test_there_are_logprobs_of_the_tokens_of_the_answer_and_no_others() -> None:
    processor = make(logprobs=0, stop=["b"], output_kind=RequestOutputKind.DELTA)
    first, last = run(processor, detailed(b"xa"), detailed(b"yzbcd"))
    assert [list(one) for one in first.logprobs or ()] == [[ord("x")], [ord("a")]]
    assert [list(one) for one in last.logprobs or ()] == [[ord("y")], [ord("z")], [ord("b")]]


def test_a_snapshot_of_logprobs_does_not_grow() -> None:
    first, last = run(make(logprobs=0), detailed(b"a"), detailed(b"b", "length"))
    assert len(first.logprobs or ()) == 1 and len(last.logprobs or ()) == 2


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_prompt_logprobs_come_with_the_first_output_or_with_all(kind: RequestOutputKind) -> None:
    processor = make(prompt_logprobs=1, output_kind=kind)
    steps = detailed(b"a", None, [7], prompt=[2]), step(b"b", "length")
    outputs = [output for one in steps for output in processor.process([one])[0]]
    expected = [None, {2: Logprob(-1.0, 2, "\x02"), 7: Logprob(-0.1, 1, "\x07")}]
    told = [output.prompt_logprobs for output in outputs]
    assert told == {"CUMULATIVE": [expected] * 2, "DELTA": [expected, None], "FINAL_ONLY": [expected]}[kind.name]
    assert all(output.outputs[0].logprobs is None for output in outputs)
