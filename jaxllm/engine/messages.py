"""What passes between an API process and its engine process: messages, as frames on a stream socket.

Invariants: frames arrive whole and in order; a frame is the length of its body (8 bytes, little-endian) and the body,
a message in MessagePack. What comes with every step is typed, for speed. Requests and configurations, which others
add fields to, are pickled within: the socket has no name, and both of its ends are the same program's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxllm.outputs import TokenOutput
from jaxllm.request import FinishReason

LENGTH_BYTES = 8
IMPORT_REMEDY = (
    "the engine's process has to be able to import what it is given: define it in a module, not in a script, and name "
    'functions as "package.module:function"'
)
CROSSING = {error.__name__: error for error in (ValueError, TypeError, OSError, MemoryError)}
"""Errors that are raised on the other side as what they are."""


class Message(msgspec.Struct, tag=True, frozen=True):
    """One of those below."""


class Start(Message, frozen=True):
    """To the engine, first: what to run."""

    config: bytes
    """Packed."""


class AddRequest(Message, frozen=True):
    """To the engine: a new request, with its children."""

    request_id: str
    request: bytes
    """Packed."""


class Abort(Message, frozen=True):
    """To the engine: end these requests."""

    request_ids: list[str]
    reason: FinishReason
    stop_reason: str | None = None


class Call(Message, frozen=True):
    """To the engine: a question; `method` names it."""

    number: int
    method: str
    arguments: list[str] = []


class Stop(Message, frozen=True):
    """To the engine: end."""


class Opened(Message, frozen=True):
    """From the engine: the model was found; weights are being loaded."""

    model: bytes
    """Packed facts of the checkpoint."""
    tokenizer: str | None
    """The file or folder that has it."""


class Ready(Message, frozen=True):
    """From the engine: it takes requests."""

    config: bytes
    """Packed, and resolved."""


class StepDone(Message, frozen=True):
    """From the engine, after every step, whether anything came of it or not: a sign of life, too."""

    outputs: list[TokenOutput]
    first_scheduled: dict[str, float]
    """When requests whose first token is among the outputs were admitted, by their ids."""


class Reply(Message, frozen=True):
    """From the engine: the answer to a call."""

    number: int
    value: Any
    """Plain: dictionaries, lists, numbers."""


class Refused(Message, frozen=True):
    """From the engine: it cannot serve a request."""

    request_id: str
    reason: str


class Ended(Message, frozen=True):
    """From the engine, last: an error it does not survive."""

    kind: str
    """The error's class, or the one of `CROSSING` it is derived from."""
    reason: str

    @classmethod
    def of(cls, error: Exception) -> Ended:
        for kind in type(error).__mro__:
            if kind.__name__ in CROSSING:
                return cls(kind.__name__, str(error))
        return cls(type(error).__name__, f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """The error as it was raised there; a RuntimeError instead of one of an unusual class."""
        return CROSSING.get(self.kind, RuntimeError)(self.reason)


type ToEngine = Start | AddRequest | Abort | Call | Stop
type FromEngine = Opened | Ready | StepDone | Reply | Refused | Ended


class Frames:
    """Cuts what arrives on a socket into messages.

    Args:
        kind: type of the messages.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes."""
        self._buffer += data
        start = 0
        try:
            while (end := self._end_of_frame(start)) is not None:
                with memoryview(self._buffer) as view:
                    message = self._decoder.decode(view[start + LENGTH_BYTES : end])
                start = end
                yield message
        finally:
            del self._buffer[:start]

    def _end_of_frame(self, start: int) -> int | None:
        """Where the frame at `start` ends, if it is all there."""
        body = start + LENGTH_BYTES
        end = body + int.from_bytes(self._buffer[start:body], "little")
        return end if body <= len(self._buffer) and end <= len(self._buffer) else None


def encode(message: Message) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def pack(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        ValueError: it holds a function that another process cannot import.
    """
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{error}: {IMPORT_REMEDY}") from error


def unpack(packed: bytes) -> Any:
    """What `pack` was given; raises as it does."""
    try:
        return pickle.loads(packed)
    except Exception as error:  # the names in it may lead to anything here
        raise ValueError(f"{error}: {IMPORT_REMEDY}") from error


_encoder = msgspec.msgpack.Encoder()
