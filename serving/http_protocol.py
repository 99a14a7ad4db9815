"""HTTP/1.1 as uvicorn and httptools read it, with what a server needs that anybody can reach.

The invariants: what is read before it means something is bounded, and so is the time for it, whoever sends it: a key is
asked for only after that.
What is no request is answered with OpenAI's error body, too. An offer to go on in another protocol (HTTP/2, which
Java's clients offer with every request) changes nothing: httptools would end the request there, without its body.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxllm.serving.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line and its headers. A little more may come with the same piece of what the socket brings."""
HEAD_SECONDS = 60.0
"""For a head to arrive whole, from its first byte or from the beginning of the connection."""
_OFFER = re.compile(rb"(?<=\n)Upgrade(?=:)", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _is_in_body = False
    _num_unused = 0
    """Bytes that were read since a request, or a piece of its body, was whole."""
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_unused += len(data)
        super().data_received(data if self._is_in_body else _without_offer(data))
        if self.transport.is_closing():
            return
        if self._num_unused > MAX_HEAD_BYTES:
            message = f"the request's head is larger than {MAX_HEAD_BYTES} bytes, which is the most this server takes"
            self._refuse(ApiError(431, message, code="too_large"))
        elif self._num_unused and not self._is_in_body and self._head_timer is None:
            self._limit_head()

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._end_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body, self._num_unused = False, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _limit_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if self._num_unused:
            self._refuse(ApiError(408, f"the request's head did not arrive within {HEAD_SECONDS:.0f} s"))
        else:
            self.transport.close()  # without a word, which could be taken for the answer to a request on its way

    def _refuse(self, error: ApiError) -> None:
        """Answer, and close the connection: where the next request begins is not known."""
        body = msgspec.json.encode(error.body)
        status = HTTPStatus(error.status)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def _without_offer(data: bytes) -> bytes:
    head, end, body = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"Ignored", head) + end + body
