"""The engine as the process of its callers sees it: what is sent to it, what it answers, and that it died.

Invariant: whoever waits for the engine gets an answer or an EngineDeadError, whatever happens to it; nothing that was
started for it stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_launch import EngineProcess, EngineThread, Launched
from jaxllm.engine.messages import (
    Call,
    Ended,
    Frames,
    FromEngine,
    Message,
    Opened,
    Ready,
    Refused,
    Reply,
    Start,
    StepDone,
    Stop,
    encode,
    pack,
    unpack,
)
from jaxllm.engine.watchdog import Watchdog

logger = logging.getLogger(__name__)

JOIN_SECONDS = 2.0
"""For a process that is dying."""
STOP_SECONDS = 10.0
"""For an engine that was told to end."""


class EngineDeadError(RuntimeError):
    """The engine died, hangs or was shut down; the message says which. Nothing can be asked of it any more."""


class EngineListener(Protocol):
    """Who uses an engine."""

    def has_requests(self) -> bool:
        """Whether steps are due."""
        ...

    def take_step(self, step: StepDone) -> None: ...

    def take_refusal(self, refused: Refused) -> None: ...

    def take_death(self, error: EngineDeadError) -> None:
        """Nothing more will come."""
        ...


class EngineClient(asyncio.Protocol):
    """One engine, launched and watched.

    Args:
        listener: gets what the engine sends unasked.
        timeout: seconds without a step, while there is work, after which the engine counts as dead.
        in_process: run it in a thread.
    """

    def __init__(self, listener: EngineListener, timeout: float, in_process: bool) -> None:
        self.is_alive = False
        """It was launched and can be asked: false from the moment that its end was noticed."""
        self._listener = listener
        self._launch: Callable[[socket.socket], Launched] = EngineThread if in_process else EngineProcess
        self._watchdog = Watchdog(timeout, self._has_work, self._ask, self._note_silence)
        self._timeout = timeout
        self._frames = Frames(FromEngine)
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            Opened: self._take_opened,
            Ready: self._take_ready,
            StepDone: listener.take_step,
            Reply: self._take_reply,
            Refused: listener.take_refusal,
            Ended: self._take_end,
        }
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._burial: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def launch(self, config: EngineConfig) -> Opened:
        """Launches it; returns when the model was found.

        Raises:
            ValueError: and whatever else the engine raised.
            EngineDeadError: it ended without a word.
        """
        loop, start = asyncio.get_running_loop(), Start(pack(config))
        self._opened: asyncio.Future[Opened] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._lost = asyncio.Event()
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            for end in (ours, theirs):
                stack.enter_context(end)
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
            self._engine = self._launch(theirs)
            stack.pop_all()
        self.is_alive = True
        self.send(start)
        return await self._opened

    async def get_ready(self) -> EngineConfig:
        """Waits until it takes requests; returns its resolved configuration. Raises as `launch` does."""
        return unpack((await self._ready).config)

    @property
    def pid(self) -> int:
        return self._engine.pid

    def send(self, message: Message) -> None:
        """Never waits. What needs a step has to be known to the listener before.

        Raises:
            EngineDeadError: it is dead.
        """
        if not self.is_alive:
            raise EngineDeadError("the engine is not running")
        self._transport.write(encode(message))
        if self._has_work():
            self._watchdog.watch()

    async def call(self, method: str, *arguments: str) -> Any:
        """Asks a question, which is answered between two steps."""
        number = next(self._numbers)
        self._calls[number] = future = asyncio.get_running_loop().create_future()
        try:
            self.send(Call(number, method, list(arguments)))
            return await future
        finally:
            del self._calls[number]

    async def stop(self) -> None:
        """Ends it, by force if need be; a second call, and one after its death, only waits for the end."""
        if self._burial is None and self.is_alive:
            self._is_stopping = True
            self.send(Stop())
            try:
                await asyncio.wait_for(self._lost.wait(), STOP_SECONDS)
            except TimeoutError:
                logger.warning("the engine did not end within %g s", STOP_SECONDS)
        await self._clear_away()

    async def kill(self) -> None:
        """Ends it at once."""
        if self._burial is None and self.is_alive:
            self._is_stopping = True
            self._engine.kill()
        await self._clear_away()

    async def _clear_away(self) -> None:
        """Nothing is left of it afterwards."""
        if self.is_alive:
            self._end("the engine was shut down")
        if self._burial is not None:
            await asyncio.shield(self._burial)

    def data_received(self, data: bytes) -> None:
        self._watchdog.note_life()
        for message in self._frames.feed(data):
            self._handlers[type(message)](message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        if not self._is_stopping:
            is_end = exc is None or isinstance(exc, ConnectionError)
            self._end("the engine ended" if is_end else f"the connection to the engine broke: {exc!r}", told=not is_end)

    def _has_work(self) -> bool:
        return bool(self._calls) or self._listener.has_requests()

    def _take_opened(self, opened: Opened) -> None:
        if not self._opened.done():
            self._opened.set_result(opened)

    def _take_ready(self, ready: Ready) -> None:
        if not self._ready.done():
            self._ready.set_result(ready)

    def _take_reply(self, reply: Reply) -> None:
        future = self._calls.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply.value)

    def _take_end(self, ended: Ended) -> None:
        self._end(f"the engine failed: {ended.reason}", ended.error())

    def _ask(self) -> None:
        """A question whose answer nobody waits for but the watchdog."""
        number = next(self._numbers)
        self._calls[number] = future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._calls.pop(number))
        self.send(Call(number, "stats"))

    def _note_silence(self) -> None:
        self._engine.kill()
        self._end(f"the engine hangs: no step was finished for {self._timeout:g} s")

    def _end(self, reason: str, cause: Exception | None = None, told: bool = True) -> None:
        """Begin to clear away; the first reason counts. If it is not `told` why, its exit says more."""
        if self._burial is None:
            self.is_alive = False
            self._watchdog.stop()
            self._burial = asyncio.get_running_loop().create_task(self._bury(reason, cause, told))

    async def _bury(self, reason: str, cause: Exception | None, told: bool) -> None:
        self._transport.abort()
        how = await asyncio.to_thread(self._engine.join, JOIN_SECONDS)
        error = EngineDeadError(reason if told else f"{reason}: {how}")
        for future in (self._opened, self._ready):
            _fail(future, cause or error)
        for future in self._calls.values():
            _fail(future, EngineDeadError(str(error)))
        self._listener.take_death(error)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # Nobody may wait for it: then it is no news.
