"""Routes for operators: /abort_requests, /reset_prefix_cache, /debug/requests, /debug/memory."""

from __future__ import annotations

from typing import Any, TypedDict

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.errors import ApiError, json_response
from jaxllm.serving.generation import engine_ids
from jaxllm.serving.requests import Items, RequestModel, read_request
from jaxllm.serving.service import Service


class AbortRequest(RequestModel):
    """Which requests to end where they are."""

    request_ids: Items[str]
    """Ids of responses, as chatcmpl-..."""


class Aborted(TypedDict):
    aborted: list[str]
    """Those of them that were not finished."""


class Reset(TypedDict):
    success: bool


class Requests(TypedDict):
    requests: list[dict[str, Any]]


async def abort_requests(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    body = await read_request(request, AbortRequest)
    aborted = [request_id for request_id in body.request_ids if await abort(service, request_id)]
    answer: Aborted = {"aborted": aborted}
    return json_response(answer)


async def abort(service: Service, request_id: str) -> bool:
    """Ends a request with finish_reason "abort"; False if there is none with this id."""
    ended = [await service.engine.abort(one) for one in engine_ids(service, request_id)]
    return any(ended)


async def reset_prefix_cache(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    if not await service.engine.reset_prefix_cache():
        raise ApiError(409, "the prefix cache is in use: it can be reset while no request runs", code="busy")
    answer: Reset = {"success": True}
    return json_response(answer)


async def debug_requests(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    answer: Requests = {"requests": await service.engine.debug_requests()}
    return json_response(answer)


async def debug_memory(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    return json_response(await service.engine.memory())


ENDPOINTS = (
    Endpoint("POST", "/abort_requests", abort_requests, "End requests where they are.", AbortRequest, Aborted),
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        reset_prefix_cache,
        "Forget cached computations of finished requests.",
        response=Reset,
        statuses=(409,),
    ),
    Endpoint("GET", "/debug/requests", debug_requests, "Every unfinished request.", response=Requests),
    Endpoint("GET", "/debug/memory", debug_memory, "Where memory went.", response=dict[str, Any]),
)
