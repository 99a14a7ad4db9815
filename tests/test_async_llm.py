"""`AsyncLLM`: many callers at once, in a process of its own and in a thread; what leaves, fails, dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import os
import random
import sys
import time
from pathlib import Path

import pytest
from async_engine import DELTA, FINAL, LONG, SETTINGS, collect, collect_rest, folder, run

from jaxllm import LLM, EngineConfig, SamplingParams
from jaxllm.engine.async_llm import AsyncLLM

__all__ = ["folder", "run"]  # fixtures

PROMPTS = [f"{'x' * (index % 5)} {index}" for index in range(12)]


def make_params(index: int, **more) -> SamplingParams:
    settings = {"temperature": 0.8 * (index % 2), "seed": index, "max_tokens": 1 + 7 * index % 23, "n": 1 + index % 3}
    return SamplingParams(**settings, ignore_eos=index % 4 > 0, **more)


@pytest.fixture(scope="module")
def engines(folder, run):
    """Made when they are first asked for, by name."""
    made: dict[str, AsyncLLM] = {}

    def get(name: str) -> AsyncLLM:
        if name not in made:
            made[name] = AsyncLLM(EngineConfig(str(folder), **SETTINGS), in_process=name == "thread")
            run(made[name].start())
        return made[name]

    yield get
    for engine in made.values():
        run(engine.shutdown(5))


@pytest.fixture(params=["process", "thread"])
def either(request, engines, run):
    engine = engines(request.param)
    yield engine
    check_idle(engine, run)


@pytest.fixture
def engine(engines, run):
    engine = engines("process")
    yield engine
    check_idle(engine, run)


def check_idle(engine, run) -> None:
    stats = run(engine.stats())
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0), "a test left something behind"
    assert engine.num_unfinished == 0


async def gather(engine: AsyncLLM, requests) -> list:
    return await asyncio.gather(
        *(collect(engine, prompt, params, str(index)) for index, (prompt, params) in enumerate(requests))
    )


def shown(output) -> list[tuple]:
    return [(answer.index, answer.text, list(answer.token_ids), answer.finish_reason) for answer in output.outputs]


@pytest.fixture(scope="module")
def requests() -> list[tuple]:
    return [(prompt, make_params(index)) for index, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(folder, requests) -> list:
    """What `LLM` answers to them."""
    with LLM(str(folder), **SETTINGS) as llm:
        return llm.generate(PROMPTS, [params for _, params in requests])


def test_the_tokens_are_those_of_llm(either, requests, expected, run):
    for index, (got, wanted) in enumerate(zip(run(gather(either, requests)), expected, strict=True)):
        assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
        assert shown(got[-1]) == shown(wanted)
        assert got[-1].request_id == str(index) and got[-1].prompt == wanted.prompt
        assert got[-1].prompt_token_ids == wanted.prompt_token_ids


def test_deltas_add_up_and_stop_strings_end_a_request(engine, run):
    [[whole]] = run(gather(engine, [("hello", SamplingParams(max_tokens=30, seed=1, output_kind=FINAL))]))
    text = whole.outputs[0].text
    stop = text[10:12]
    delta = SamplingParams(max_tokens=30, seed=1, stop=stop, output_kind=DELTA)
    [outputs] = run(gather(engine, [("hello", delta)]))
    assert "".join(output.outputs[0].text for output in outputs) == text[: text.index(stop)]
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_times_are_in_order(engine, run, kind):
    before = time.monotonic()
    [outputs] = run(gather(engine, [("hello", SamplingParams(max_tokens=9, ignore_eos=True, n=2, output_kind=kind))]))
    times = [output.metrics for output in outputs]
    last = times[-1]
    steps = [last.arrival_time, last.first_scheduled_time, last.first_token_time, last.last_token_time]
    moments = [before, *steps, time.monotonic()]
    assert moments == sorted(moments)
    assert last.first_token_time < last.last_token_time
    assert len({time.last_token_time for time in times}) == len(times), "each output has its own time"
    assert all(time.first_token_time == last.first_token_time for time in times)


def test_what_is_wrong_with_a_request_reaches_its_caller_only(either, run):
    bad = {
        "prompt has 500 tokens": ("x" * 500, LONG),
        "prompt is empty": ([], LONG),
        "prompt holds 270 at position 1": ([1, 270], LONG),
        "is not a SamplingParams": ("x", {"max_tokens": 3}),
        "cache_salt=3": ({"prompt": "x", "cache_salt": 3}, LONG),
    }

    async def all_of_them():
        good = asyncio.create_task(collect(either, "hello", LONG, "good"))
        await asyncio.sleep(0)
        for message, (prompt, params) in bad.items():
            with pytest.raises(ValueError, match=message):
                await collect(either, prompt, params, "bad")
        with pytest.raises(ValueError, match="request_id='good' is in use"):
            await collect(either, "hello", LONG, "good")
        with pytest.raises(ValueError, match="request_id=7 is not a string"):
            await collect(either, "hello", LONG, 7)
        return await good

    outputs = run(all_of_them())
    assert len(outputs[-1].outputs[0].token_ids) == 140


def test_classes_of_a_script_end_no_engine(engine, run, monkeypatch):
    """The engine's process cannot import them; plain values that are of such a class are as good as others."""
    script = sys.modules["__main__"]
    for made in (enum.StrEnum("Text", {"E": "e"}), enum.IntEnum("Number", {"NONE": 0})):
        made.__module__ = "__main__"
        monkeypatch.setattr(script, made.__name__, made, raising=False)
    mine = type("Mine", (SamplingParams,), {"__module__": "__main__"})
    monkeypatch.setattr(script, "Mine", mine, raising=False)

    async def ask(prompt, params, priority=0):
        return [output async for output in engine.generate(prompt, params, "x", priority)]

    prompt = {"prompt": "hello", "cache_salt": script.Text.E}
    params = dataclasses.replace(LONG, stop=script.Text.E, bad_words=[script.Text.E], max_tokens=4)
    assert run(ask(prompt, params, script.Number.NONE))[-1].finished
    with pytest.raises(ValueError, match=r"Mine.*define it in a module, not in a script"):
        run(ask("hello", mine(max_tokens=4)))


def test_who_leaves_frees_everything_within_a_step(either, run):
    async def leave():
        streams = [either.generate("hello", dataclasses.replace(LONG, n=3), name) for name in ("cancelled", "closed")]
        for stream in streams:
            await anext(stream)
        assert (await either.stats()).num_running == 6
        assert {state["request_id"] for state in await either.debug_requests()} >= {"closed", "1_closed"}
        reader = asyncio.create_task(collect_rest(streams[0]))
        await asyncio.sleep(0)
        reader.cancel()
        await streams[1].aclose()
        with pytest.raises(asyncio.CancelledError):
            await reader
        stats = await either.stats()  # is answered after the abort, before the next step
        assert (stats.num_running, stats.num_used_blocks) == (0, 0)

    run(leave())


def test_abort_gives_a_last_output(either, run):
    async def abort():
        stream = either.generate("hello", dataclasses.replace(LONG, n=2), "a")
        await anext(stream)
        assert await either.abort("a")
        assert not await either.abort("a"), "it ended before"
        again = collect(either, "hello", dataclasses.replace(LONG, max_tokens=5), "a")
        return await asyncio.gather(collect_rest(stream), again)

    (*_, last), (*_, again) = run(abort())
    assert last.finished and [answer.finish_reason for answer in last.outputs] == ["abort", "abort"]
    assert shown(again) == [(0, again.outputs[0].text, again.outputs[0].token_ids, "length")]
    assert len(again.outputs[0].token_ids) == 5, "it gets nothing of the aborted request of its name"


def test_two_hundred_streams_with_random_departures(engine, run):
    rng = random.Random(0)

    async def visit(index: int) -> tuple[int, int]:
        """Tokens that came, and that were expected."""
        params = SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True, output_kind=DELTA)
        leaves_after = rng.choice([None, None, 0, 1, 3])
        await asyncio.sleep(rng.random() / 2)
        stream, num_tokens = engine.generate(PROMPTS[index % 12], params, str(index)), 0
        async with contextlib.aclosing(stream):
            async for output in stream:
                num_tokens += len(output.outputs[0].token_ids)
                if leaves_after is not None and num_tokens > leaves_after:
                    return num_tokens, num_tokens
        return num_tokens, params.max_tokens

    async def all_of_them():
        return await asyncio.gather(*map(visit, range(200)))

    before = run(engine.stats())
    counts = run(all_of_them())
    assert all(came == expected for came, expected in counts)
    after = run(engine.stats())
    assert after.num_used_blocks == 0 and after.num_compiles_since_ready == before.num_compiles_since_ready == 0
    assert after.num_generated_tokens - before.num_generated_tokens >= sum(came for came, _ in counts)
    assert after.num_steps > before.num_steps and 0 <= after.padding_share < 1


def test_questions(either, run):
    assert either.is_ready and either.is_running and either.dead_error is None
    assert either.config.max_model_len == 160 and either.model_config.vocab_size == 270
    assert either.tokenizer.decode(either.tokenizer.encode("hello")) == "hello"
    assert run(either.debug_requests()) == []
    memory = run(either.memory())
    assert memory["pool"]["used_blocks"] == 0 and memory["devices"][0]["kv_cache"] > 0

    async def reset_while_running():
        stream = either.generate("hello", LONG, "a")
        await anext(stream)
        refused = await either.reset_prefix_cache()
        await stream.aclose()
        return refused, await either.reset_prefix_cache()

    assert run(reset_while_running()) == (False, True)


def test_an_idle_engine_costs_nothing(engine, run):
    run(gather(engine, [("hello", LONG)]))
    before = cpu_seconds(engine.pid)
    run(asyncio.sleep(2))
    assert cpu_seconds(engine.pid) - before < 0.1


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_caller_that_does_not_read_delays_nobody_and_misses_nothing(engine, run):
    async def be_slow() -> tuple[list, list, list]:
        params = dataclasses.replace(LONG, output_kind=DELTA, logprobs=1, max_tokens=30)
        whole = await collect(engine, "hello", dataclasses.replace(params, output_kind=FINAL), "whole")
        slow = {name: engine.generate("hello", params, name) for name in "ab"}
        firsts = [await anext(stream) for stream in slow.values()]
        await collect(engine, "hello", LONG, "c")
        assert (await engine.stats()).num_running == 0, "they are computed, although nobody read them yet"
        rest = [await collect_rest(stream) for stream in slow.values()]
        return whole, firsts, rest

    [whole], firsts, rests = run(be_slow())
    for first, rest in zip(firsts, rests, strict=True):
        [last] = rest  # what waited for its reader is one output
        parts = [output.outputs[0] for output in (first, last)]
        assert [*parts[0].token_ids, *parts[1].token_ids] == whole.outputs[0].token_ids
        assert parts[0].text + parts[1].text == whole.outputs[0].text
        logprobs = [[*one] for part in parts for one in part.logprobs]
        assert logprobs == [[*one] for one in whole.outputs[0].logprobs]
        assert last.finished and parts[1].finish_reason == "length"
