"""Runs the prompts of one request through the engine, until all are answered, or the client or the time is gone.

The invariant: whatever ends a request, the engine stops working for it: the iterator of every prompt is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from jaxllm.engine.async_llm import EngineDeadError
from jaxllm.engine.request_maker import TokensPrompt
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serving.errors import bad_request
from jaxllm.serving.service import Service

type Emit = Callable[[int, RequestOutput], Awaitable[None]]
"""Takes the next output of the prompt with this index."""

TIMEOUT_HEADER = "x-request-timeout"


class ClientGone(Exception):
    """The client closed its connection: nobody reads an answer."""


@dataclass(frozen=True)
class Generation:
    """The prompts of a request and how each is answered."""

    service: Service
    request_id: str
    """Of the response; prompts have it with their index behind."""
    prompts: Sequence[list[int]]
    params: SamplingParams
    cache_salt: str | None = None
    priority: int = 0
    timeout: float | None = None
    """Seconds."""
    only_prompt: bool = False
    """The answer is left out: only what is told of the prompt counts."""

    async def run(self, emit: Emit) -> None:
        """Gives every output to `emit`; returns when all are finished.

        Raises:
            ApiError: the request may not enter.
            ValueError: the engine refuses it.
            TimeoutError: it took too long.
            EngineDeadError: the engine died.
        """
        with self.service.admission.enter(self.request_id, len(self.prompts) * self.params.n):
            async with asyncio.timeout(self.timeout):
                if len(self.prompts) == 1:
                    await self._answer(0, emit)
                else:
                    await self._answer_all(emit)

    async def _answer_all(self, emit: Emit) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self.prompts)):
                    group.create_task(self._answer(index, emit))
        except* Exception as errors:  # noqa: BLE001 - raised again
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None

    async def _answer(self, index: int, emit: Emit) -> None:
        prompt: TokensPrompt = {"prompt_token_ids": self.prompts[index]}
        if self.cache_salt is not None:
            prompt["cache_salt"] = self.cache_salt
        watch = _Watch(self.service, self.params)
        engine_id, priority = self.engine_id(index), self.priority
        try:
            async with aclosing(self.service.engine.generate(prompt, self.params, engine_id, priority)) as outputs:
                async for output in outputs:
                    watch.note(output)
                    await emit(index, _without_answer(output) if self.only_prompt else output)
        except ValueError:  # it was refused: no answer began
            raise
        except BaseException as error:
            watch.note_break("error" if isinstance(error, EngineDeadError) else "abort")
            raise

    def engine_id(self, index: int) -> str:
        """The engine's id of a prompt."""
        return f"{self.request_id}-{index}"


def _without_answer(output: RequestOutput) -> RequestOutput:
    answers = [
        replace(one, text="", token_ids=[], finish_reason=one.finish_reason and "length") for one in output.outputs
    ]
    return replace(output, outputs=answers)


def engine_ids(service: Service, request_id: str) -> list[str]:
    """The engine's ids of an unfinished request's prompts; none if there is no such request."""
    return [f"{request_id}-{index}" for index in range(service.admission.num_answers(request_id))]


class _Watch:
    """Measures one prompt's answers as they come."""

    def __init__(self, service: Service, params: SamplingParams) -> None:
        self._metrics = service.metrics
        self._params = params
        self._num_generated = 0
        self._last_time: float | None = None
        self._reasons: list[str] = []

    def note(self, output: RequestOutput) -> None:
        now, times = time.monotonic(), output.metrics
        assert times is not None, "outputs of a server's engine have times"
        if self._last_time is None:
            self._metrics.observe_first(times)
        else:
            self._metrics.observe_gap(now - self._last_time)
        self._last_time = now
        for answer in output.outputs:
            self._num_generated += len(answer.token_ids)
            if answer.finish_reason is not None:
                self._reasons.append(answer.finish_reason)
        if output.finished:
            self._metrics.observe_end(self._params, len(output.prompt_token_ids), self._num_generated, times)
            self._metrics.count_ends(self._reasons)

    def note_break(self, reason: str) -> None:
        """Nothing more comes: the client or the engine is gone, or the time is over."""
        num_unfinished = self._params.n - len(self._reasons)
        if num_unfinished:
            self._metrics.count_ends([*self._reasons, *[reason] * num_unfinished])


async def until_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def get_timeout(service: Service, request: Request) -> float | None:
    """Seconds that an answer may take: the server's limit, or less if the request asks for it.

    Raises:
        ApiError: the header is no time.
    """
    limit, text = service.settings.request_timeout, request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return limit
    try:
        asked = float(text)
    except ValueError:
        asked = -1.0
    if not 0 < asked < float("inf"):
        raise bad_request(f"{TIMEOUT_HEADER}: {text!r} is not a time: use seconds above 0", param=TIMEOUT_HEADER)
    return asked if limit is None else min(asked, limit)
