"""What passes between processes: every message arrives as it was, however the socket cuts it; and the watchdog."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time

import pytest

pytest.importorskip("msgspec")

from jaxllm.config import EngineConfig
from jaxllm.engine.messages import (
    Abort,
    AddRequest,
    Call,
    Ended,
    Frames,
    FromEngine,
    Opened,
    Ready,
    Refused,
    Reply,
    Start,
    StepDone,
    Stop,
    ToEngine,
    encode,
    pack,
    unpack,
)
from jaxllm.engine.watchdog import Watchdog
from jaxllm.outputs import TokenOutput
from jaxllm.request import FinishReason, Request
from jaxllm.sampling_params import SamplingParams

PARAMS = SamplingParams(seed=2**70, stop=["a", "é"], stop_token_ids=[3], n=3, max_tokens=None)


def make_request(params: SamplingParams = PARAMS) -> Request:
    request = Request("a", (1, 2, 269), params, frozenset({4, 5}), max_len=9, seed=2**64 - 1, cache_salt="s")
    request.fork({"1_a": 0, "2_a": 2**63})
    return request


def receive(kind, data: bytes, sizes) -> list:
    """Messages of `data`, which arrives in pieces."""
    frames, messages, start = Frames(kind), [], 0
    while start < len(data):
        size = next(sizes)
        messages += frames.feed(data[start : start + size])
        start += size
    return messages


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        (
            ToEngine,
            [
                Start(pack(EngineConfig("m", max_model_len="auto"))),
                Abort(["a", "1_a"], FinishReason.STOP, "é"),
                Call(3, "stats"),
                Stop(),
            ],
        ),
        (
            FromEngine,
            [
                Opened(b"x", None),
                Ready(b"x"),
                StepDone([TokenOutput("a", (1, 2), (-0.5, float("-inf")), "stop", "x", 3)], {"a": 0.1}),
                StepDone([], {}),
                Reply(3, {"x": [1, None, 0.5]}),
                Refused("a", "why"),
                Ended("ValueError", "why"),
            ],
        ),
    ],
)
def test_messages_arrive_as_they_were(kind, messages):
    data, rng = b"".join(map(encode, messages)), random.Random(0)
    for most in (1, 3, 50, len(data)):
        assert receive(kind, data, iter(lambda most=most: rng.randint(1, most), None)) == messages


def test_a_request_arrives_as_it_was():
    sent = make_request()
    [message] = Frames(ToEngine).feed(encode(AddRequest("a", pack(sent))))
    arrived = unpack(message.request)
    for field in dataclasses.fields(Request):
        if field.name not in ("parent", "children"):
            assert getattr(arrived, field.name) == getattr(sent, field.name), field.name
    family = [(child.request_id, child.seed, child.prompt_ids, child.parent) for child in arrived.children]
    assert family == [("1_a", 0, (1, 2, 269), arrived), ("2_a", 2**63, (1, 2, 269), arrived)]


def test_functions_cross_by_their_names_only():
    assert unpack(pack(dataclasses.replace)) is dataclasses.replace
    for packed in (lambda: pack(lambda x: x), lambda: unpack(b"cno_such_module\nf\n.")):
        with pytest.raises(ValueError, match=r'functions as "package\.module:function"'):
            packed()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("x=1"), ValueError, "x=1"),
        (FileNotFoundError("gone"), OSError, "gone"),
        (KeyError("k"), RuntimeError, "KeyError: 'k'"),
    ],
)
def test_errors_are_raised_as_what_they_were(error, kind, message):
    again = Ended.of(error).error()
    assert type(again) is kind and str(again) == message


async def watch(has_work, during, answers=True) -> list[float]:
    """Seconds after which a watchdog with 0.2 s of patience called; who it asks may answer."""
    called: list[float] = []
    started = time.monotonic()
    ask = lambda: watchdog.note_life() if answers else None  # noqa: E731
    watchdog = Watchdog(0.2, has_work, ask, lambda: called.append(time.monotonic() - started))
    watchdog.watch()
    await during(watchdog)
    watchdog.stop()
    return called


def test_silence_is_noticed_once():
    [seconds] = asyncio.run(watch(lambda: True, lambda _: asyncio.sleep(0.8)))
    assert 0.2 <= seconds < 0.7


def test_there_is_no_silence_without_work_and_after_the_watch():
    assert asyncio.run(watch(lambda: False, lambda _: asyncio.sleep(0.4))) == []
    assert asyncio.run(watch(lambda: True, lambda _: asyncio.sleep(0.1))) == []


def test_work_that_is_taken_back_does_not_hide_silence():
    turns = itertools.cycle([True, False])

    async def work_again(watchdog: Watchdog) -> None:
        for _ in range(8):
            watchdog.watch()
            await asyncio.sleep(0.1)

    assert asyncio.run(watch(lambda: next(turns), work_again, answers=False)) != []
    assert asyncio.run(watch(lambda: next(turns), work_again)) == []


def test_signs_of_life_are_heard_even_if_the_loop_stood_still():
    async def live(watchdog: Watchdog) -> None:
        for _ in range(4):
            time.sleep(0.3)  # the loop cannot hear anything
            await asyncio.sleep(0.01)
            watchdog.note_life()

    assert asyncio.run(watch(lambda: True, live)) == []
