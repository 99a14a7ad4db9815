"""What a client is told when something is wrong: OpenAI's error body, with a fitting HTTP status.

The invariant: every response that is no success has this body, whatever failed and wherever.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TypedDict

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.engine.async_llm import EngineDeadError
from jaxllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
_FIRST_WORD = re.compile(r"\w+")
_FIELDS = {item.name for item in fields(SamplingParams)} | {"prompt", "messages", "priority", "cache_salt"}
"""What the messages of checks begin with."""


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """What OpenAI's clients make exceptions of."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that cannot be served.

    Args:
        status: of HTTP.
        message: what is wrong, and what helps.
        param: field of the request that is to blame.
        code: a word for programs.
        headers: for the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: float = 1) -> ApiError:
    """503, for a while."""
    headers = {"Retry-After": str(max(1, round(retry_after)))}
    return ApiError(503, message, code="unavailable", headers=headers)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception; one that nobody foresaw is logged and not explained."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case TimeoutError():
            return ApiError(504, "the request took longer than it may: its answer was given up", code="timeout")
        case EngineDeadError():
            return ApiError(500, f"the engine cannot go on: {error}", code="engine_dead")
        case ValueError():
            found = _FIRST_WORD.match(str(error))
            return bad_request(str(error), param=found[0] if found and found[0] in _FIELDS else None)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "an error inside the server: its log says more", code="internal_error")


def error_response(error: BaseException) -> Response:
    """The response to a request that raised this."""
    told = as_api_error(error)
    return json_response(told.body, told.status, told.headers)


async def handle_error(request: Request, error: Exception) -> Response:
    """`error_response`, in the form of a Starlette handler."""
    return error_response(error)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
