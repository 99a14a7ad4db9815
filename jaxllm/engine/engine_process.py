"""The engine's side of `AsyncLLM`: a loop of steps that takes messages from a socket and answers on it.

Invariants: it waits for messages only while it has nothing to do, and for nothing else: a reader that is slow never
delays a step. It ends when the other side is gone. Text is no matter of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.engine.core import EngineCore
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.inspection import inspect_memory, inspect_requests
from jaxllm.engine.memory_use import device_bytes, resident_bytes
from jaxllm.engine.messages import (
    Abort,
    AddRequest,
    Call,
    Ended,
    Frames,
    Message,
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
from jaxllm.engine.start import start_core
from jaxllm.logs import FORMAT
from jaxllm.model_config import ModelConfig
from jaxllm.outputs import TokenOutput
from jaxllm.request import Request

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1


class EngineLink:
    """The engine's end of the socket.

    Raises:
        EOFError: (any method) the other end is closed.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = Frames(ToEngine)
        self._unsent = bytearray()
        self._posted: deque[Message] = deque()
        self._selector = selectors.DefaultSelector()
        end.setblocking(False)
        self._selector.register(end, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        """A byte from the first to the second ends a wait."""
        for own in (self._waker, self._woken):
            own.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def receive(self, wait: bool) -> list[Any]:
        """Messages that are there; at least one if it may wait for it."""
        messages = self._read()
        self._send_posted()
        while wait and not messages:
            self._wait()
            messages = self._read()
            self._send_posted()
        return messages

    def send(self, message: Message) -> None:
        """Send what the socket takes now, and the rest later on."""
        self._unsent += encode(message)
        self._write()

    def post(self, message: Message) -> None:
        """Send from another thread: as soon as the loop receives. Nothing happens once the link is closed."""
        self._posted.append(message)
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Send what is left, and close."""
        try:
            self._socket.setblocking(True)
            self._socket.sendall(self._unsent)
        except OSError:  # nobody reads any more
            logger.debug("the other end is closed")
        self._selector.close()
        for end in (self._socket, self._waker, self._woken):
            end.close()

    def _wait(self) -> None:
        self._selector.modify(self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0))
        self._selector.select()
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(READ_BYTES)
        self._write()

    def _send_posted(self) -> None:
        while self._posted:
            self.send(self._posted.popleft())

    def _read(self) -> list[Any]:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return list(self._frames.feed(data))

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError from error


class EngineLoop:
    """Runs an engine core for the other end of a link."""

    def __init__(self, core: EngineCore, link: EngineLink) -> None:
        self._core = core
        self._link = link
        self._without_token: dict[str, Request] = {}
        """Requests that got no token yet."""
        self._num_prompt_tokens = self._num_cached_prompt_tokens = self._num_generated_tokens = 0
        self._stopped = False
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            AddRequest: self._add,
            Abort: self._abort,
            Call: self._answer,
            Stop: self._stop,
        }
        self._calls: dict[str, Callable[..., Any]] = {
            "stats": self._stats,
            "reset_prefix_cache": core.reset_prefix_cache,
            "memory": lambda: inspect_memory(core).to_dict(),
            "start_profile": self._start_profile,
            "debug_requests": lambda: [state.to_dict() for state in inspect_requests(core)],
        }
        self._long_calls: dict[str, Callable[..., Callable[[], Any]]] = {"stop_profile": self._end_profile}
        """What these return makes the answer, in a thread: steps do not wait for it."""

    def run(self) -> None:
        """Until it is told to stop.

        Raises:
            EOFError: the other end is closed.
        """
        while not self._stopped:
            for message in self._link.receive(wait=not self._core.has_unfinished):
                self._handlers[type(message)](message)
            if self._core.has_unfinished and not self._stopped:
                self._step()

    def _add(self, message: AddRequest) -> None:
        try:
            request: Request = unpack(message.request)
            members = {one.request_id: one for one in (request, *request.children)}
            self._core.add_request(request)
        except ValueError as error:
            self._link.send(Refused(message.request_id, str(error)))
        else:
            self._without_token |= members

    def _abort(self, message: Abort) -> None:
        for request_id in message.request_ids:
            self._core.abort(request_id, message.reason, message.stop_reason)
            self._without_token.pop(request_id, None)

    def _answer(self, message: Call) -> None:
        if message.method not in self._long_calls:
            self._link.send(Reply(message.number, self._calls[message.method](*message.arguments)))
            return
        make = self._long_calls[message.method](*message.arguments)
        threading.Thread(
            target=lambda: self._link.post(Reply(message.number, make())), name=f"jaxllm {message.method}"
        ).start()

    def _start_profile(self, folder: str) -> dict[str, str]:
        return _folder_or_error(lambda: self._core.start_profile(Path(folder)).folder)

    def _end_profile(self) -> Callable[[], dict[str, str]]:
        try:
            session = self._core.end_profile()
        except (ValueError, OSError) as error:
            answer = {"error": str(error)}
            return lambda: answer
        return lambda: _folder_or_error(session.write)

    def _stop(self, message: Stop) -> None:
        self._stopped = True

    def _step(self) -> None:
        outputs = self._core.step()
        self._link.send(StepDone(outputs, self._count(outputs)))

    def _count(self, outputs: Sequence[TokenOutput]) -> dict[str, float]:
        """Keep the totals; returns when those of the requests that got their first token were admitted."""
        first_scheduled: dict[str, float] = {}
        for output in outputs:
            self._num_generated_tokens += len(output.new_token_ids)
            request = self._without_token.pop(output.request_id, None)
            if request is not None:
                assert request.first_scheduled_time is not None, f"{request.request_id} was never admitted"
                first_scheduled[request.request_id] = request.first_scheduled_time
                self._num_prompt_tokens += request.prompt_len
                self._num_cached_prompt_tokens += request.num_cached
        return first_scheduled

    def _stats(self) -> dict[str, Any]:
        scheduler, runner = self._core.scheduler, self._core.runner
        steps, tokens, padded_tokens = runner.counts.values
        kv, chunk_bytes = scheduler.kv.stats(), runner.host.chunk_bytes
        prefix_cache = kv.prefix_cache
        in_use, limit = device_bytes(runner.mesh.devices.flat)
        stats = EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting - scheduler.num_swapped,
            num_swapped=scheduler.num_swapped,
            kv_cache_usage=scheduler.kv.usage,
            num_used_blocks=scheduler.kv.num_used_blocks,
            num_blocks=scheduler.kv.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=prefix_cache.queries,
            prefix_cache_hits=prefix_cache.hits,
            host_cache_hits=prefix_cache.host_hits,
            host_cache_usage=kv.host.usage,
            num_host_blocks=kv.host.total_blocks,
            bytes_swapped_out=runner.host.num_out * chunk_bytes,
            bytes_swapped_in=runner.host.num_in * chunk_bytes,
            num_compiles_since_ready=runner.num_compiles_since_ready,
            num_steps=steps,
            num_step_tokens=tokens,
            num_padded_tokens=padded_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            step_seconds=self._core.log.seconds,
            resident_bytes=resident_bytes(),
            device_bytes_in_use=in_use,
            device_bytes_limit=limit,
        )
        return dataclasses.asdict(stats)


def _folder_or_error(profile: Callable[[], Path]) -> dict[str, str]:
    """What goes wrong with a profile is no reason for the engine to end."""
    try:
        return {"folder": str(profile())}
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    except Exception as error:
        logger.exception("the profile is lost")
        return {"error": f"{type(error).__name__}: {error}"}


def run_engine(end: socket.socket) -> bool:
    """Everything from the first message to the last; false if something went wrong, which the other end was told."""
    with contextlib.closing(EngineLink(end)) as link:
        try:
            with contextlib.closing(_start(link)) as core:
                return _serve(core, link)
        except EOFError:
            return True
        except ValueError as error:  # What a user did wrong is told, not logged.
            _report(link, error)
            return False
        except Exception as error:
            logger.exception("the engine cannot start")
            _report(link, error)
            return False


def main(arguments: Sequence[str]) -> int:
    """The process. Arguments: the socket's file descriptor, the parent's process id, the level of what is logged."""
    descriptor, parent, log_level = map(int, arguments)
    _die_with(parent)
    # Ctrl-C is the parent's affair: it may want its answers finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Of other libraries only warnings: JAX at debug level tells of every operation.
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    logging.getLogger("jaxllm").setLevel(log_level)
    return 0 if run_engine(socket.socket(fileno=descriptor)) else 1


def _start(link: EngineLink) -> EngineCore:
    (start,) = link.receive(wait=True)
    assert isinstance(start, Start), "the first message has to say what to run"

    def tell_source(model: ModelConfig, tokenizer: Path | None) -> None:
        link.send(Opened(pack(model), None if tokenizer is None else str(tokenizer)))

    core = start_core(unpack(start.config), tell_source)
    gc.collect()
    gc.freeze()  # What there is now stays: looking through it again would only delay steps.
    link.send(Ready(pack(core.runner.config)))
    return core


def _serve(core: EngineCore, link: EngineLink) -> bool:
    try:
        EngineLoop(core, link).run()
    except EOFError:
        logger.info("the engine ends: nobody uses it any more")
    except Exception as error:
        logger.exception("the engine cannot go on")
        _report(link, error)
        return False
    return True


def _report(link: EngineLink, error: Exception) -> None:
    try:
        link.send(Ended.of(error))
    except EOFError:
        logger.info("nobody is left to be told")


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, even in the middle of a step."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        logger.warning("the engine process may outlive its parent: prctl: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it died before
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
