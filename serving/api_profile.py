"""Routes that record a profile of the engine: /start_profile, /stop_profile.

The invariant: they are refused unless the operator named a folder to record in, and no request names one.
"""

from __future__ import annotations

from typing import Any, TypedDict

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.errors import ApiError, json_response
from jaxllm.serving.service import Service


class Started(TypedDict):
    folder: str
    """Below which it is recorded."""


class Stopped(TypedDict):
    folder: str
    """Its files: JAX's trace, summary.json, timeline.html and memory.pprof."""
    summary: dict[str, Any]


async def start_profile(request: Request) -> ASGIApp:
    service, folder = _allowed(request)
    try:
        await service.engine.start_profile(folder)
    except ValueError as error:
        raise _conflict(error) from error
    answer: Started = {"folder": folder}
    return json_response(answer)


async def stop_profile(request: Request) -> ASGIApp:
    service, _ = _allowed(request)
    try:
        report = await service.engine.stop_profile()
    except ValueError as error:
        raise _conflict(error) from error
    answer: Stopped = {"folder": report["folder"], "summary": report["summary"]}
    return json_response(answer)


def _allowed(request: Request) -> tuple[Service, str]:
    service: Service = request.app.state.service
    folder = service.settings.profiler_dir
    if folder is None:
        raise ApiError(
            403, "profiling is off: start the server with --profiler-dir FOLDER to allow it", code="profiling_off"
        )
    service.check_ready()
    return service, folder


def _conflict(error: ValueError) -> ApiError:
    return ApiError(409, str(error), code="profile")


ENDPOINTS = (
    Endpoint(
        "POST",
        "/start_profile",
        start_profile,
        "Record what host and device do, until /stop_profile. Steps take longer meanwhile.",
        response=Started,
        statuses=(403, 409),
    ),
    Endpoint(
        "POST",
        "/stop_profile",
        stop_profile,
        "End the recording: where it lies, and what it says.",
        response=Stopped,
        statuses=(403, 409),
    ),
)
