"""Server-sent events: an answer while it is made.

The invariants: an error before the first event is a response of its own, with its status; one after it is an event.
A stream ends with [DONE], whatever happened; one that does not was cut off. An event is the same bytes whether it was
made from a template or from its value.
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

SEND_PART = "send_part"
"""In a request's state: sends parts of its response's body, but not their beginning."""
CLIENT_LEFT = "client_left"
"""In a request's state: nobody read the stream to its end."""

_encode = msgspec.json.Encoder().encode


def event(content: object) -> bytes:
    """A value as an event."""
    return b"data: " + _encode(content) + b"\n\n"


class TextTemplate:
    """Events that differ in nothing but a text: all of them cost what their text does.

    Args:
        content: such an event, as a value in which `PLACE` stands where its text goes and nothing after it is free.
    """

    PLACE = "\0"

    def __init__(self, content: object) -> None:
        before, found, after = event(content).rpartition(_encode(self.PLACE))
        assert found, "an event without a place for its text"
        self._before, self._after = before, after

    def event(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class AnswerWriter(Protocol):
    """Makes the response of one request; made anew for each."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Mapping[str, Any]:
        """The response, of the finished output of every prompt."""
        ...

    def part(self, index: int, output: RequestOutput, counter: UsageCounter) -> bytes | None:
        """A part of the response as an event: what is new of the prompt with this index. None: nothing can be shown."""
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(scope, send)
        try:
            await until_gone(receive, self._run(body))
        except ClientGone:
            if not body.has_begun:
                raise
            scope["state"][CLIENT_LEFT] = True
        except Exception as error:
            if not body.has_begun:
                raise
            await body.write(event(as_api_error(error).body) + DONE, more=False)

    async def _run(self, body: _Body) -> None:
        async def emit(index: int, output: RequestOutput) -> None:
            self._counter.note(index, output)
            events = self._writer.part(index, output, self._counter)
            if events is not None:
                await body.write(events)

        await self._generation.run(emit)
        last = self._writer.usage_chunk(self._counter.usage)
        await body.write(DONE if last is None else event(last) + DONE, more=False)


class _Body:
    """The events of one response, which begins with the first of them."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.has_begun = False
        self._scope = scope
        self._send = send

    async def write(self, events: bytes, more: bool = True) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            # Past everything that looks at the beginning of a response only: a stream has thousands of parts.
            self._send = self._scope["state"][SEND_PART]
        await self._send({"type": "http.response.body", "body": events, "more_body": more})
