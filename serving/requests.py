"""From the bytes of a request to a checked model of its API.

The invariant: a field that the server does not know or does not serve yet is refused by its name; none is accepted
and ignored. Some clients write down the fields they do not use: a value that asks for nothing is no mistake. Checking
ends at the first mistake of a list, so that one with a million of them costs no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from jaxllm.serving.errors import ApiError, bad_request

MAX_BODY_SECONDS = 60.0
"""For a body to arrive whole."""

_NOT_SERVED: Final = "unsupported"
_NOT_SERVED_MESSAGE: Final = "{name} is not supported by this server yet: leave it away"
_UNKNOWN: Final = "unknown_field"
_UNKNOWN_MESSAGE: Final = "Unrecognized request argument supplied: {name}"


class FirstMistake(FailFast):
    """Checking a list, or a dictionary, ends at its first mistake."""

    def __hash__(self) -> int:  # what is part of a union needs one
        return hash(self.fail_fast)


_Item = TypeVar("_Item")
Items = Annotated[list[_Item], FirstMistake()]
"""A list in a request."""


class RequestModel(BaseModel):
    """A body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that clients may send with these values only, which ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            if name in cls.not_served:
                if not _is_one_of(value, cls.not_served[name]):
                    raise PydanticCustomError(_NOT_SERVED, _NOT_SERVED_MESSAGE, {"name": name})
            elif name not in cls.model_fields:
                raise PydanticCustomError(_UNKNOWN, _UNKNOWN_MESSAGE, {"name": name})
        return {name: value for name, value in given.items() if name not in cls.not_served}


async def read_request[T: RequestModel](request: Request, kind: type[T]) -> T:
    """The checked body of a request.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    _check_media_type(request)
    return parse_request(await _read_body(request), kind)


def parse_request[T: RequestModel](body: bytes, kind: type[T]) -> T:
    """The checked model of a JSON text.

    Raises:
        ApiError: 400.
    """
    try:
        given = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise bad_request("the body has to be a JSON object")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _describe(error, given) from error


def _check_media_type(request: Request) -> None:
    """Pages of any site may send other types from a browser, unasked: this one only where the server lets them."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"Content-Type is {given!r}: send application/json", code="unsupported_media_type")


async def _read_body(request: Request) -> bytes:
    limit = request.app.state.service.settings.max_request_bytes
    if int(request.headers.get("content-length") or 0) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {MAX_BODY_SECONDS:.0f} s") from error
    except ClientDisconnect as error:
        raise bad_request("the client went away before its request was whole") from error
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes, which is the most this server takes", code="too_large")


def _is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _describe(error: ValidationError, given: dict[str, Any]) -> ApiError:
    """The first of the mistakes."""
    mistakes = error.errors(include_url=False, include_input=False)
    first = mistakes[0]
    if first["type"] in (_NOT_SERVED, _UNKNOWN):
        name = first.get("ctx", {})["name"]
        param = _path({**first, "loc": (*first["loc"], name)}, given)
        text = _UNKNOWN_MESSAGE.format(name=param) if first["type"] == _UNKNOWN else first["msg"]
        return bad_request(text, param=param, code=first["type"])
    field = _path(first, given)
    paths = [(_path(one, given), one["msg"]) for one in mistakes]
    # Where a field may be of several types, the one that was checked furthest is what was meant.
    param = max((path for path, _ in paths if path.startswith(field)), key=lambda path: path.count("["))
    reasons = dict.fromkeys(text for path, text in paths if path == param)
    return bad_request(_reason(param, list(reasons)), param=param or None, code="invalid_value")


def _reason(param: str, reasons: list[str]) -> str:
    text = " or ".join([reasons[0], *(reason.removeprefix("Input should be ") for reason in reasons[1:])])
    return f"{param}: {text}" if param else text


def _path(mistake: ErrorDetails, given: Any) -> str:
    """Where in the body something is wrong, as messages[0].content; pydantic's names of alternatives are left out."""
    path = ""
    for item in mistake["loc"]:
        if isinstance(item, int) and isinstance(given, list):
            path += f"[{item}]"
            given = given[item] if item < len(given) else None
        elif isinstance(item, str) and isinstance(given, dict) and (item in given or mistake["type"] == "missing"):
            path += f".{item}" if path else item
            given = given.get(item)
    return path
