"""How an `AsyncLLM` ends: it cannot start, hangs, is killed, is shut down, or loses its parent."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from async_engine import LONG, SETTINGS, collect, collect_rest, folder, run

from jaxllm import EngineConfig
from jaxllm.engine.async_llm import AsyncLLM, EngineDeadError

__all__ = ["folder", "run"]  # fixtures


def test_an_engine_that_cannot_start_says_why(run, capfd):
    async def start():
        engine = AsyncLLM(EngineConfig("/no/such/model", **SETTINGS))
        with pytest.raises(ValueError, match="/no/such/model"):
            await engine.start()
        assert not engine.is_ready and not engine.is_running
        await engine.shutdown(1)
        return engine.pid

    assert not is_there(run(start()))
    assert capfd.readouterr() == ("", ""), "what a user did wrong is told once"


def test_an_engine_that_was_never_started(run):
    async def use():
        engine = AsyncLLM(EngineConfig("/no/such/model"))
        for asked in (engine.stats(), collect(engine, "hello", LONG, "a")):
            with pytest.raises(EngineDeadError, match="not running"):
                await asked
        await engine.shutdown(1)

    run(use())


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def lose(engine: AsyncLLM, signal_number: int) -> tuple[float, list]:
    """Sends the engine a signal while it works; seconds until all its callers knew, and what they got."""
    requests = [asyncio.create_task(collect(engine, "hello", LONG, str(index))) for index in range(20)]
    await asyncio.sleep(0.02)
    os.kill(engine.pid, signal_number)
    started = time.monotonic()
    results = await asyncio.gather(*requests, engine.wait_dead(), return_exceptions=True)
    return time.monotonic() - started, results


def test_callers_that_give_up_early_do_not_hide_that_an_engine_hangs(folder, run):
    async def give_up(engine: AsyncLLM, times: int) -> None:
        for index in range(times):
            if engine.dead_error is not None:
                return
            with contextlib.suppress(TimeoutError, EngineDeadError):
                await asyncio.wait_for(collect(engine, "hello", LONG, str(index)), 0.1)
            await asyncio.sleep(0.4)

    async def check():
        engine = AsyncLLM(EngineConfig(str(folder), **SETTINGS), engine_timeout=1.5)
        await engine.start()
        await give_up(engine, 3)
        assert engine.dead_error is None, "it lives"
        os.kill(engine.pid, signal.SIGSTOP)
        await give_up(engine, 14)
        assert "the engine hangs" in str(engine.dead_error)
        await engine.shutdown(1)

    run(check())


def test_callers_of_an_engine_that_hangs_and_of_one_that_is_killed(folder, run):
    """After both, nothing is left of it."""

    async def start() -> AsyncLLM:
        engine = AsyncLLM(EngineConfig(str(folder), **SETTINGS), engine_timeout=1.5)
        await engine.start()
        return engine

    async def check(engine: AsyncLLM, signal_number: int, message: str) -> None:
        seconds, results = await lose(engine, signal_number)
        assert seconds < 5
        assert {type(result) for result in results} == {EngineDeadError}
        assert all(message in str(result) for result in results)
        assert not engine.is_ready and not engine.is_running and message in str(engine.dead_error)
        for asked in (engine.stats(), collect(engine, "hello", LONG, "late")):
            with pytest.raises(EngineDeadError):
                await asked
        await engine.shutdown(1)
        assert not is_there(engine.pid)

    async def both():
        hanging, killed = await start(), await start()
        await check(hanging, signal.SIGSTOP, "the engine hangs: no step was finished for 1.5 s")
        await check(killed, signal.SIGKILL, "the engine ended: it was killed by SIGKILL")

    run(both())


SCRIPT = """
import asyncio, json, sys
from jaxllm import EngineConfig, SamplingParams
from jaxllm.engine.async_llm import AsyncLLM

assert "jax" not in sys.modules

async def main():
    llm = AsyncLLM(EngineConfig(sys.argv[1], **json.loads(sys.argv[2])))
    await llm.start()
    print(llm.pid, flush=True)
    async for output in llm.generate("hello", SamplingParams(max_tokens=2), "a"):
        pass
    print(len(output.outputs[0].token_ids), flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        await llm.shutdown(0)
        print(llm.dead_error, "jax" in sys.modules, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_an_engine_does_not_outlive_its_parent(folder, signal_number):
    """A script needs no `if __name__ == "__main__"`, and a process that only asks needs no JAX."""
    command = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(SETTINGS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        pid, num_tokens = int(parent.stdout.readline()), int(parent.stdout.readline())
        assert num_tokens == 2 and is_there(pid)
        parent.send_signal(signal_number)
        rest, errors = parent.communicate(timeout=20)
    if signal_number == signal.SIGINT:
        assert rest.split("\n")[0] == "the engine was shut down False"
        assert "engine" not in errors.replace("llm.engine", ""), "Ctrl-C is nothing to an engine"
    wait_until(lambda: not is_there(pid))


def wait_until(holds, timeout: float = 5) -> None:
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


def test_shutdown_lets_requests_finish_for_a_while(folder, run):
    async def shut_down() -> list:
        engine = AsyncLLM(EngineConfig(str(folder), **SETTINGS), in_process=True)
        await engine.start()
        tokens = {"short": 20, "long": 140}
        streams = {
            name: engine.generate("x", dataclasses.replace(LONG, max_tokens=tokens[name]), name) for name in tokens
        }
        for stream in streams.values():
            await anext(stream)
        readers = [asyncio.create_task(collect_rest(stream)) for stream in streams.values()]
        ending = asyncio.create_task(engine.shutdown(0.0))
        await asyncio.sleep(0)
        assert not engine.is_ready
        with pytest.raises(EngineDeadError, match="not running"):
            await collect(engine, "x", LONG, "late")
        await ending
        await engine.shutdown(0)
        assert str(await engine.wait_dead()) == "the engine was shut down"
        return await asyncio.gather(*readers)

    for outputs in run(shut_down()):
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
