"""From the bytes of a request to a checked model of its API.

The invariant: a field that the server does not know or does not serve yet is refused by its name; none is accepted
and ignored. Some clients write down the fields they do not use: a value that asks for nothing is no mistake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from jaxllm.serving.errors import ApiError, bad_request

MAX_BODY_SECONDS = 60.0
"""For a body to arrive whole."""

_NOT_SERVED: Final = "unsupported"
_NOT_SERVED_MESSAGE: Final = "{name} is not supported by this server yet: leave it away"


class RequestModel(BaseModel):
    """A body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that clients may send with these values only, which ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in cls.not_served.keys() & given.keys():
            if not _is_one_of(given[name], cls.not_served[name]):
                raise PydanticCustomError(_NOT_SERVED, _NOT_SERVED_MESSAGE, {"name": name})
        return {name: value for name, value in given.items() if name not in cls.not_served}


async def read_request[T: RequestModel](request: Request, kind: type[T]) -> T:
    """The checked body of a request.

    Raises:
        ApiError: 400, 408 or 413.
    """
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
    first = error.errors(include_url=False)[0]
    if first["type"] == _NOT_SERVED:
        param = _path((*first["loc"], first.get("ctx", {})["name"]), given)
        return bad_request(first["msg"], param=param, code=_NOT_SERVED)
    param = _path(first["loc"], given) or None
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {param}", param=param, code="unknown_field")
    text = first["msg"].removeprefix("Value error, ")
    others = {_path(other["loc"], given) for other in error.errors(include_url=False, include_input=False)}
    if error.error_count() > 1 and others == {param}:
        choices = dict.fromkeys(other["msg"].removeprefix("Input should be ") for other in error.errors())
        text = f"Input should be {' or '.join(choices)}"
    return bad_request(f"{param}: {text}" if param else text, param=param, code="invalid_value")


def _path(location: tuple[int | str, ...], given: Any) -> str:
    """Where in the body something is wrong, as messages[0].content; pydantic's names of alternatives are left out."""
    path = ""
    for item in location:
        if isinstance(item, int) and isinstance(given, list):
            path += f"[{item}]"
            given = given[item] if item < len(given) else None
        elif isinstance(item, str) and isinstance(given, dict):
            path += f".{item}" if path else item
            given = given.get(item)
    return path
