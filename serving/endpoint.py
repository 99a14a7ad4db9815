"""A route and what its documentation says: both are made from one value."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm.serving.requests import RequestModel

type Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[RequestModel] | None = None
    """Model of the body."""
    response: Any = None
    """Type of the body of a success; None: it is empty or plain text."""
    chunk: Any = None
    """Type of the events, where the request can ask for a stream."""
    media_type: str = "application/json"
    """Of a success."""
    statuses: tuple[int, ...] = ()
    """Of errors, besides those that every route can have."""
