"""Sends requests to a server and notes when what came back: the client side of `jaxllm bench serve`.

Invariant: nothing is computed while answers come but what the times need, so that the client does not slow the
server down; it keeps up with 10,000 events a second.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_DATA, _DONE = b"data: ", b"data: [DONE]"
_MAX_MESSAGE = 300
"""Characters of a refusal that are worth reading."""


@dataclass(slots=True)
class Trace:
    """One request, in seconds of `time.perf_counter`."""

    sent: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Of the events that brought something."""
    num_tokens: int = 0
    """As the server counts them."""
    error: str | None = None
    """Why there is no whole answer."""

    @property
    def first(self) -> float:
        """Seconds up to the first event."""
        return self.arrivals[0] - self.sent

    @property
    def whole(self) -> float:
        """Seconds up to the last event."""
        return self.arrivals[-1] - self.sent

    @property
    def per_token(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Client:
    """A connection pool to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def get(self, path: str) -> Any:
        """The JSON behind a path.

        Raises:
            OSError: the server cannot be reached, or refuses.
        """
        async with self._session.get(self._url + path) as response:
            if response.status != 200:
                raise OSError(f"{self._url}{path} answers {response.status}: {(await response.text())[:_MAX_MESSAGE]}")
            return await response.json()

    async def complete(self, body: bytes) -> Trace:
        """One streamed answer; whatever goes wrong is noted in it."""
        trace = Trace(time.perf_counter())
        try:
            async with self._session.post(self._url + "/v1/completions", data=body) as response:
                if response.status != 200:
                    trace.error = f"{response.status}: {(await response.text())[:_MAX_MESSAGE]}"
                else:
                    await _read(response, trace)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            trace.error = f"{type(error).__name__}: {error}"
        trace.ended = time.perf_counter()
        return trace


@asynccontextmanager
async def connect(url: str, api_key: str | None, timeout: float) -> AsyncIterator[Client]:
    """A client of the server at this address, which may end in /v1.

    Args:
        timeout: seconds for one request.
    """
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0)
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=limit) as session:
        yield Client(session, url.rstrip("/").removesuffix("/v1"))


async def closed_loop(client: Client, bodies: Sequence[bytes], concurrency: int) -> list[Trace]:
    """All requests, with so many in flight."""
    left = iter(bodies)
    traces: list[Trace] = []

    async def work() -> None:
        for body in left:
            traces.append(await client.complete(body))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return traces


async def open_loop(client: Client, bodies: Sequence[bytes], rate: float, seed: int) -> list[Trace]:
    """All requests, so many a second, at random moments."""
    arrivals = random.Random(seed)
    tasks: list[asyncio.Task[Trace]] = []
    due = time.perf_counter()
    for body in bodies:
        await asyncio.sleep(due - time.perf_counter())
        tasks.append(asyncio.create_task(client.complete(body)))
        due += arrivals.expovariate(rate)
    return await asyncio.gather(*tasks)


async def _read(response: aiohttp.ClientResponse, trace: Trace) -> None:
    last = b""
    async for line in response.content:
        if not line.startswith(_DATA):
            continue
        if line.startswith(_DONE):
            break
        trace.arrivals.append(time.perf_counter())
        last = line
    else:
        trace.error = "the stream was cut off"
        return
    event = json.loads(last.removeprefix(_DATA)) if last else {}
    if "error" in event:
        trace.error = str(event["error"])[:_MAX_MESSAGE]
    elif not event.get("usage") or len(trace.arrivals) < 2:
        trace.error = "the stream has no usage at its end"
    else:
        # The event with the usage brings no token.
        trace.arrivals.pop()
        trace.num_tokens = event["usage"]["completion_tokens"]
