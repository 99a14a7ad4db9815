"""One request's outputs on their way from the engine to a caller who may be slow.

Invariants: a caller gets all that came since it last asked as one output, so that a slow one costs less, not more;
nothing of a DELTA output is lost or out of order; an error comes after what came before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxllm.outputs import CompletionOutput, RequestOutput, RequestTimes
from jaxllm.request import Request
from jaxllm.sampling_params import RequestOutputKind

MOST_QUEUED = 64
"""Outputs that are kept apart until the caller asks: each takes more memory than its text."""


class OutputStream:
    """The outputs of one request, for one caller.

    Args:
        request_id: as the caller calls it.
        request: as the engine has it.
        times: of the request, up to its newest output; kept up to date by whoever puts outputs here.
    """

    def __init__(self, request_id: str, request: Request, times: RequestTimes) -> None:
        self.request_id = request_id
        self.engine_id = request.request_id
        self.times = times
        self._keeps_all = request.params.output_kind is RequestOutputKind.DELTA
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Adds an output; of those that are not DELTA, only the newest is kept."""
        if not self._keeps_all:
            self._outputs.clear()
        elif len(self._outputs) == MOST_QUEUED:
            self._outputs = [merge_deltas(self._outputs)]
        self._outputs.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more will come, for this reason."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """What is new, as one output; a caller that is cancelled loses nothing.

        Raises:
            Exception: what `fail` was given.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        output = outputs[0] if len(outputs) == 1 else merge_deltas(outputs)
        times = self.times
        output.request_id = self.request_id
        output.metrics = RequestTimes(
            times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time
        )
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge_deltas(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """DELTA outputs of a request that follow each other, as one; they are of no more use afterwards."""
    answers: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for answer in output.outputs:
            answers.setdefault(answer.index, []).append(answer)
    merged = outputs[-1]
    merged.outputs = [_join(parts) for parts in answers.values()]
    told = (output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None)
    merged.prompt_logprobs = next(told, None)
    return merged


def _join(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    joined = parts[-1]
    joined.text = "".join([part.text for part in parts])
    joined.token_ids = [token_id for part in parts for token_id in part.token_ids]
    if joined.logprobs is not None:
        joined.logprobs = [candidates for part in parts for candidates in part.logprobs or ()]
    return joined
