"""Holds a server under a mixed load and looks for what must not be there: leaks, lost answers, wrong refusals.

    .venv/bin/python scripts/soak_server.py MODEL [--streams 200] [--seconds 120] [FLAGS OF jaxllm serve]

Starts `jaxllm serve MODEL` and keeps that many clients busy: most stream an answer to its end, others abort, hang up
in the middle, or send what has to be refused. Afterwards no request may be left, no block in use, every answer that
ended has to be whole, and the memory of the server's processes must not have grown by more than 1 MB a minute (said
for a minute or longer only). Prints the figures as JSON; fails if one is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

MAX_SLOPE = 1.0
"""MB a minute."""
MIN_SECONDS_FOR_SLOPE = 60
WARM_UP_SHARE = 0.3
PROGRAM = [sys.executable, "-c", "import sys; from jaxllm.serving.cli import main; sys.exit(main())"]
START_SECONDS = 300
NUM_PROMPTS = 500
KINDS = {"stream": 60, "whole": 10, "abort": 10, "leave": 12, "refused": 8}
"""What a client does, and how often of 100 times."""
REFUSED: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b'{"prompt": "x", "mood": 1}', 400),
    (b'{"prompt": "x", "model": "other"}', 404),
    (b'{"prompt": "x", "temperature": -1}', 400),
    (b'{"prompt": "' + b"long " * 20000 + b'"}', 400),
)


type Sample = tuple[float, int, int]
"""Seconds since the start, and the bytes that the server's and the engine's process hold then."""


class Soak:
    """The load on one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._session = session
        self._url = url
        self._random = random.Random(seed)
        # A tokenizer remembers some thousand words: with new ones all the time, that looks like a leak for minutes.
        lengths = [self._random.randint(1, 60) for _ in range(NUM_PROMPTS)]
        self._prompts = ["".join(self._random.choices("abcdefgh \n", k=length)) for length in lengths]

    async def work(self, until: float) -> None:
        """One client."""
        while time.monotonic() < until:
            (kind,) = self._random.choices(list(KINDS), list(KINDS.values()))
            try:
                await getattr(self, f"_{kind}")()
            except (aiohttp.ClientError, TimeoutError, AssertionError, KeyError, ValueError) as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            self.counts[kind] += 1

    async def get(self, path: str) -> Any:
        async with self._session.get(self._url + path) as response:
            return await response.json()

    def _body(self, **fields: Any) -> dict[str, Any]:
        body = {
            "prompt": self._random.choice(self._prompts),
            "max_tokens": self._random.randint(1, 40),
            "ignore_eos": True,
        }
        return body | {"temperature": self._random.choice([0, 1])} | fields

    async def _whole(self) -> None:
        body = self._body(n=self._random.choice([1, 2]))
        async with self._post(body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        assert answer["usage"]["completion_tokens"] == body["n"] * body["max_tokens"], answer["usage"]

    async def _stream(self) -> None:
        body = self._body(stream=True, stream_options={"include_usage": True})
        events = await self._read(body, None)
        assert events[-1]["usage"]["completion_tokens"] == body["max_tokens"], events[-1]
        assert events[-2]["choices"][0]["finish_reason"] == "length", events[-2]

    async def _abort(self) -> None:
        body = self._body(stream=True, max_tokens=60)
        events = await self._read(body, self._random.randint(1, 10))
        assert events[-1]["choices"][0]["finish_reason"] in ("abort", "length"), events[-1]

    async def _leave(self) -> None:
        num_events = self._random.randint(0, 10)
        async with self._post(self._body(stream=True, max_tokens=60)) as response:
            assert response.status == 200, await response.text()
            for _ in range(num_events):
                await response.content.readline()
            response.close()

    async def _refused(self) -> None:
        data, status = self._random.choice(REFUSED)
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url + "/v1/completions", data=data, headers=headers) as response:
            assert response.status == status, f"{response.status} for {data[:40]!r}"
            assert (await response.json())["error"]["message"]

    async def _read(self, body: dict[str, Any], abort_after: int | None) -> list[dict[str, Any]]:
        """All events of a stream, which is aborted after some of them."""
        events: list[dict[str, Any]] = []
        async with self._post(body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    return events
                if text:
                    events.append(json.loads(text))
                    assert "error" not in events[-1], events[-1]
                if abort_after is not None and len(events) == abort_after:
                    abort_after = None
                    ids = {"request_ids": [events[0]["id"]]}
                    async with self._session.post(self._url + "/abort_requests", json=ids) as answer:
                        assert answer.status == 200, await answer.text()
        raise AssertionError("the stream was cut off")

    def _post(self, body: dict[str, Any]) -> Any:
        return self._session.post(self._url + "/v1/completions", json=body)


async def soak(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load; returns the figures."""
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        load = Soak(session, url, options.seed)
        start = time.monotonic()
        samples: list[Sample] = []
        memory = asyncio.create_task(_watch_memory(pid, start, samples))
        await asyncio.gather(*(load.work(start + options.seconds) for _ in range(options.streams)))
        seconds = time.monotonic() - start
        memory.cancel()
        left = await _wait_for_end(load)
    figures = {"seconds": round(seconds, 1), "streams": options.streams, "requests": dict(load.counts), **left}
    late = np.array([sample for sample in samples if sample[0] > WARM_UP_SHARE * seconds])
    for column, name in enumerate(("server", "engine"), 1):
        figures[f"{name}_mb"] = round(samples[-1][column] / 1e6, 1)
        slope = 60 * float(np.polyfit(late[:, 0], late[:, column], 1)[0])
        figures[f"{name}_mb_per_minute"] = round(slope / 1e6, 3)
    return figures | {"wrong": len(load.wrong), "first_wrong": load.wrong[:3]}


async def _watch_memory(pid: int, start: float, samples: list[Sample]) -> None:
    """Adds a sample every second."""
    engine = max(_children(pid), key=_resident_bytes)
    while True:
        samples.append((time.monotonic() - start, _resident_bytes(pid), _resident_bytes(engine)))
        await asyncio.sleep(1)


async def _wait_for_end(load: Soak) -> dict[str, int]:
    """Requests and blocks that are still there two seconds after the last client left."""
    await asyncio.sleep(2)
    pool = (await load.get("/debug/memory"))["pool"]
    requests = (await load.get("/debug/requests"))["requests"]
    left = (await load.get("/load"))["server_load"]
    return {"leaked_blocks": pool["used_blocks"], "leaked_requests": len(requests), "leaked_http_requests": left}


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def run(options: argparse.Namespace, serve_flags: list[str]) -> dict[str, Any]:
    """Starts the server, soaks it, and ends it."""
    with tempfile.NamedTemporaryFile("w+", prefix="soak-server-", suffix=".log", delete=False) as log:
        flags = ["serve", options.model, "--port", "0", *serve_flags]
        server = await asyncio.create_subprocess_exec(*PROGRAM, *flags, stdout=log, stderr=log)
        try:
            url = await _wait_ready(Path(log.name), server)
            figures = await soak(url, server.pid, options)
        finally:
            if server.returncode is None:
                server.send_signal(signal.SIGTERM)
            await server.wait()
    return figures | {"exit_code": server.returncode, "log": log.name}


async def _wait_ready(log: Path, server: asyncio.subprocess.Process) -> str:
    deadline = time.monotonic() + START_SECONDS
    while server.returncode is None and time.monotonic() < deadline:
        if address := find_address(log.read_text()):
            return address
        await asyncio.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def find_address(log: str) -> str | None:
    """Of a server that is ready, by what it wrote."""
    found = re.search(r"listening on (\S+)", log) if " is ready" in log else None
    return found[1] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    figures = asyncio.run(run(options, flags))
    print(json.dumps(figures, indent=1))
    leaks = [name for name in figures if name.startswith("leaked") and figures[name]]
    slope = figures["server_mb_per_minute"] + figures["engine_mb_per_minute"]
    too_steep = options.seconds >= MIN_SECONDS_FOR_SLOPE and slope > MAX_SLOPE
    if leaks or too_steep or figures["wrong"] or figures["exit_code"] or not figures["requests"].get("stream"):
        sys.exit(1)


if __name__ == "__main__":
    main()
