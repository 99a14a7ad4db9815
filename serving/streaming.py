"""Server-sent events: an answer while it is made.

The invariant: an error before the first event is a response of its own, with its status; one after it is an event.
A stream ends with [DONE], whatever happened; one that does not was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from jaxllm.outputs import RequestOutput
from jaxllm.serving.errors import as_api_error
from jaxllm.serving.generation import ClientGone, Generation, until_gone
from jaxllm.serving.protocol import Usage
from jaxllm.serving.usage import UsageCounter

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that collects events would take their sense.
    (b"x-accel-buffering", b"no"),
]

_encode = msgspec.json.Encoder().encode


def event(content: object) -> bytes:
    """A value as an event."""
    return b"data: " + _encode(content) + b"\n\n"


class AnswerWriter(Protocol):
    """Makes the response of one request; made anew for each."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Mapping[str, Any]:
        """The response, of the finished output of every prompt."""
        ...

    def chunk(self, index: int, output: RequestOutput, counter: UsageCounter) -> Mapping[str, Any] | None:
        """A part of the response: what is new of the prompt with this index. None: nothing that can be shown."""
        ...

    def usage_chunk(self, usage: Usage) -> Mapping[str, Any] | None:
        """The last part, with the usage of the whole request; None if that was not asked for."""
        ...


class EventStream:
    """The response to a request for a stream: an ASGI application."""

    def __init__(self, generation: Generation, writer: AnswerWriter, counter: UsageCounter) -> None:
        self._generation = generation
        self._writer = writer
        self._counter = counter
        self._send: Send | None = None
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await until_gone(receive, self._run())
        except ClientGone:
            if not self._started:
                raise
        except Exception as error:
            if not self._started:
                raise
            await self._write(event(as_api_error(error).body) + DONE)
            await send({"type": "http.response.body", "body": b""})

    async def _run(self) -> None:
        await self._generation.run(self._emit)
        last = self._writer.usage_chunk(self._counter.usage)
        await self._write(DONE if last is None else event(last) + DONE)
        assert self._send is not None, "called as an application"
        await self._send({"type": "http.response.body", "body": b""})

    async def _emit(self, index: int, output: RequestOutput) -> None:
        self._counter.note(index, output)
        chunk = self._writer.chunk(index, output, self._counter)
        if chunk is not None:
            await self._write(event(chunk))

    async def _write(self, events: bytes) -> None:
        assert self._send is not None, "called as an application"
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
