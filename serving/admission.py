"""Who may enter: a bound on waiting requests, and none any more once the server ends.

The invariant: whatever entered leaves, so that the count is of requests that are being answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxllm.serving.errors import ApiError, bad_request, unavailable

_MAX_RETRY_AFTER = 30.0
"""Seconds."""
_SMOOTHING = 0.1


class Admission:
    """The requests that are being answered.

    Args:
        max_waiting: answers that may wait besides those that run.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_running = 1
        """Answers that run at once; set when the engine has said so."""
        self.is_draining = False
        self._max_waiting = max_waiting
        self._entered: dict[str, int] = {}
        self._num_answers = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._seconds_per_answer = 0.0
        self._last_left = time.monotonic()

    def __len__(self) -> int:
        return len(self._entered)

    @property
    def request_ids(self) -> list[str]:
        return list(self._entered)

    def num_answers(self, request_id: str) -> int:
        """Of a request that is being answered; 0 for any other."""
        return self._entered.get(request_id, 0)

    @contextmanager
    def enter(self, request_id: str, num_answers: int) -> Iterator[None]:
        """For the time a request is being answered.

        Raises:
            ApiError: 400 if the id is in use or the request can never enter, 429 if too many wait, 503 if the server ends.
        """
        self._check(request_id, num_answers)
        if not self._entered:  # the time in which nobody was there says nothing
            self._last_left = time.monotonic()
        self._entered[request_id] = num_answers
        self._num_answers += num_answers
        self._empty.clear()
        try:
            yield
        finally:
            self._leave(request_id)

    def check_size(self, num_answers: int) -> None:
        """Raises ApiError if a request for so many answers can never enter."""
        if num_answers > self._limit:
            raise bad_request(
                f"the request asks for {num_answers} answers, but {self._limit} is the most this server takes"
            )

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def _check(self, request_id: str, num_answers: int) -> None:
        if self.is_draining:
            raise unavailable("the server is shutting down", self._retry_after)
        if request_id in self._entered:
            message = f"request_id={request_id!r} belongs to a request that is not finished: use another one"
            raise bad_request(message, param="request_id")
        self.check_size(num_answers)
        if self._num_answers + num_answers > self._limit:
            headers = {"Retry-After": str(round(self._retry_after))}
            message = f"{self._num_answers} answers are running or waiting, and {self._limit} may: try again later"
            raise ApiError(429, message, code="queue_full", headers=headers)

    def _leave(self, request_id: str) -> None:
        num_answers = self._entered.pop(request_id)
        self._num_answers -= num_answers
        if not self._entered:
            self._empty.set()
        now = time.monotonic()
        self._seconds_per_answer += _SMOOTHING * ((now - self._last_left) / num_answers - self._seconds_per_answer)
        self._last_left = now

    @property
    def _limit(self) -> int:
        return self.max_running + self._max_waiting

    @property
    def _retry_after(self) -> float:
        """Seconds until about half of those who wait have begun."""
        waiting = max(self._num_answers - self.max_running, 0)
        return min(max(waiting / 2 * self._seconds_per_answer, 1.0), _MAX_RETRY_AFTER)
