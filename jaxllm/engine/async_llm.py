"""`AsyncLLM`: many concurrent callers over one engine, which runs in a process of its own.

Invariants: steps never wait for callers, whatever they do with their outputs; a caller that leaves frees what its
request holds before the next step; what is wrong with a request reaches its caller only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.answers import Answers
from jaxllm.engine.engine_client import EngineClient, EngineDeadError
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.messages import Abort, AddRequest, Refused, StepDone, pack, unpack
from jaxllm.engine.output_stream import OutputStream
from jaxllm.engine.profile_report import ProfileReport, read_apart
from jaxllm.engine.request_maker import Prompt, RequestMaker
from jaxllm.engine.stand_in_tokenizer import open_tokenizer
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.logs import set_up_log
from jaxllm.model_config import ModelConfig
from jaxllm.outputs import RequestOutput, RequestTimes
from jaxllm.request import FinishReason
from jaxllm.sampling_params import SamplingParams

__all__ = ["AsyncLLM", "EngineDeadError", "EngineStats"]

DEFAULT_ENGINE_TIMEOUT = 60.0
"""Seconds."""
LONG_PROMPT = 10_000
"""Characters, or tokens, from which on a prompt is prepared in a thread: other callers would have to wait for it."""


class AsyncLLM:
    """Many concurrent callers over one engine.

    Args:
        config: the engine's.
        in_process: run the engine in a thread, for debugging: slower, and it cannot be killed if it hangs.
        engine_timeout: seconds without a finished step, while there is work, after which the engine counts as dead.
            With enforce_eager a step can take as long as compiling it.
    """

    config: EngineConfig
    """Resolved: max_model_len and the like are numbers. This and the next two: once `start` returned."""
    model_config: ModelConfig
    tokenizer: Tokenizer

    def __init__(
        self, config: EngineConfig, *, in_process: bool = False, engine_timeout: float = DEFAULT_ENGINE_TIMEOUT
    ) -> None:
        set_up_log()
        self.dead_error: EngineDeadError | None = None
        """Why the engine is of no use any more."""
        self._given_config = config
        self._client = EngineClient(self, engine_timeout, in_process)
        self._streams: dict[str, OutputStream] = {}
        """Those of unfinished requests, by the ids that the engine knows them by."""
        self._engine_ids: dict[str, str] = {}
        """What the engine calls them, by the callers' ids."""
        self._numbers = itertools.count()
        self._is_open = self._was_ready = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead = asyncio.Event()

    async def start(self) -> None:
        """Starts the engine; returns when it is ready.

        Raises:
            ValueError: what the engine raised: the model, a field or their combination is not usable.
            EngineDeadError: the engine ended before it was ready.
        """
        try:
            opened = await self._client.launch(self._given_config)
            self.model_config = unpack(opened.model)
            path = None if opened.tokenizer is None else Path(opened.tokenizer)
            self.tokenizer = await asyncio.to_thread(open_tokenizer, path, self.model_config)
            self.config = await self._client.get_ready()
        except BaseException:
            await self._client.kill()
            raise
        self._maker = RequestMaker(self.tokenizer, self.config, self.model_config)
        self._answers = Answers(self.tokenizer)
        self._is_open = self._was_ready = True

    @property
    def is_ready(self) -> bool:
        """It takes requests: started, not shut down, not dead."""
        return self._is_open and self._client.is_alive

    @property
    def is_running(self) -> bool:
        """The engine answers: it was ready once, and did not die, hang or get shut down since."""
        return self._was_ready and self._client.is_alive

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._client.pid

    @property
    def num_unfinished(self) -> int:
        """Requests whose callers wait (one for all answers of n > 1)."""
        return len(self._streams)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request, as `params.output_kind` asks; the last one is `finished`.

        The request is aborted if the iterator is closed or its task cancelled before. Every output has `metrics`. A
        caller that reads slowly gets several DELTA outputs as one, and of CUMULATIVE ones the newest. Errors come at
        the first `anext`.

        Raises:
            ValueError: the request cannot be served, or its id belongs to an unfinished one.
            EngineDeadError: the engine died, or is being shut down.
        """
        stream = await self._enter(prompt, params, request_id, priority)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._abort(stream)

    async def abort(self, request_id: str) -> bool:
        """Ends a request: its iterator gets a last output, with "abort". False if there is no such unfinished one."""
        engine_id = self._engine_ids.get(request_id)
        if engine_id is None:
            return False
        self._abort(self._streams[engine_id])
        return True

    async def wait_dead(self) -> EngineDeadError:
        """Returns once the engine is dead, or shut down."""
        await self._dead.wait()
        assert self.dead_error is not None, "it is dead for a reason"
        return self.dead_error

    async def reset_prefix_cache(self) -> bool:
        """Forgets the K/V of finished requests; False and nothing changed while requests are running."""
        return await self._client.call("reset_prefix_cache")

    async def stats(self) -> EngineStats:
        """The engine as it is after the step that runs now, as every answer of it."""
        return EngineStats(**await self._client.call("stats"))

    async def debug_requests(self) -> list[dict[str, Any]]:
        """Every unfinished request, as `jaxllm.debug.debug_sequence_states` has them."""
        states = await self._client.call("debug_requests")
        return [state | {"request_id": _callers_id(state["request_id"])} for state in states]

    async def memory(self) -> dict[str, Any]:
        """As `LLM.memory_stats().to_dict()`."""
        return await self._client.call("memory")

    async def start_profile(self, folder: str) -> None:
        """Records from now on what the engine does, below `folder`; see `LLM.start_profile`.

        Raises:
            ValueError: something is being recorded or written already, or the folder cannot be written to.
        """
        await self._profile("start_profile", folder)

    async def stop_profile(self) -> ProfileReport:
        """Ends the recording, writes it in a thread and reads it in a process of its own: no request waits for that.

        Raises:
            ValueError: nothing is being recorded, or no step ran meanwhile.
        """
        return await read_apart(await self._profile("stop_profile"))

    async def _profile(self, method: str, *arguments: str) -> str:
        answer = await self._client.call(method, *arguments)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["folder"]

    async def shutdown(self, timeout: float) -> None:
        """Refuses new requests, gives unfinished ones `timeout` seconds, aborts the rest and ends the engine.

        A second call, and one after the engine's death, only cleans up.
        """
        self._is_open = False
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for stream in list(self._streams.values()):
                self._abort(stream)
        await self._client.stop()

    def has_requests(self) -> bool:
        """Part of `EngineListener`, as the next three."""
        return bool(self._streams)

    def take_step(self, step: StepDone) -> None:
        now = time.monotonic()
        for engine_id, first_scheduled_time in step.first_scheduled.items():
            stream = self._streams.get(engine_id)
            if stream is not None:
                stream.times.first_scheduled_time = first_scheduled_time
                stream.times.first_token_time = now
        outputs, stopped = self._answers.process(step.outputs)
        for stop in stopped:
            self._client.send(Abort([stop.request_id], FinishReason.STOP, stop.stop))
        for output in outputs:
            stream = self._streams[output.request_id]
            stream.times.last_token_time = now
            self._put(stream, output)

    def take_refusal(self, refused: Refused) -> None:
        stream = self._streams.get(refused.request_id)
        if stream is not None:
            self._answers.abort(refused.request_id)
            self._forget(stream)
            stream.fail(ValueError(refused.reason))

    def take_death(self, error: EngineDeadError) -> None:
        self.dead_error = error
        self._is_open = False
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.fail(EngineDeadError(str(error)))
        self._dead.set()

    async def _enter(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str, priority: int
    ) -> OutputStream:
        times = RequestTimes(time.monotonic())
        self._check_open()
        if not isinstance(request_id, str):
            raise ValueError(f"request_id={request_id!r} is not a string")
        # The id is not used for two requests, ever: what steps in flight bring for one that ended must not be taken
        # for another's.
        engine_id = f"{request_id}-{next(self._numbers)}"
        if _is_long(prompt):
            text, request = await asyncio.to_thread(self._maker.make, engine_id, prompt, params, priority)
            self._check_open()
        else:
            text, request = self._maker.make(engine_id, prompt, params, priority)
        if request_id in self._engine_ids:
            raise ValueError(f"request_id={request_id!r} is in use by an unfinished request: choose another")
        request.arrival_time = times.arrival_time
        packed = pack(request)
        self._answers.add(text, request)
        stream = OutputStream(request_id, request, times)
        self._streams[engine_id], self._engine_ids[request_id] = stream, engine_id
        self._idle.clear()
        self._client.send(AddRequest(engine_id, packed))
        return stream

    def _check_open(self) -> None:
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error))
        if not self.is_ready:
            raise EngineDeadError("the engine is not running")

    def _abort(self, stream: OutputStream) -> None:
        """End a request where it is, unless it ended before."""
        if self._streams.get(stream.engine_id) is not stream:
            return
        members, output = self._answers.abort(stream.engine_id)
        assert output is not None, f"{stream.engine_id} has a stream but no answer"
        self._put(stream, output)
        if self._client.is_alive:
            self._client.send(Abort(members, FinishReason.ABORT))

    def _put(self, stream: OutputStream, output: RequestOutput) -> None:
        if output.finished:
            self._forget(stream)
        stream.put(output)

    def _forget(self, stream: OutputStream) -> None:
        del self._streams[stream.engine_id], self._engine_ids[stream.request_id]
        if not self._streams:
            self._idle.set()


def _is_long(prompt: Any) -> bool:
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
    return hasattr(prompt, "__len__") and len(prompt) > LONG_PROMPT


def _callers_id(engine_id: str) -> str:
    return engine_id.rpartition("-")[0]
