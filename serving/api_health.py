"""Routes that load balancers and monitoring ask: /health, /ping, /version, /load, /metrics."""

from __future__ import annotations

import asyncio
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxllm.engine.async_llm import EngineDeadError, EngineStats
from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.errors import json_response
from jaxllm.serving.metrics import CONTENT_TYPE
from jaxllm.serving.service import VERSION, Service

STATS_SECONDS = 2.0
"""For the engine to answer: who watches a server wants to hear of one that hangs, too."""


class Health(TypedDict):
    status: str


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: int


async def health(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    body: Health = {"status": "ok"}
    return json_response(body)


async def version(request: Request) -> ASGIApp:
    body: Version = {"version": VERSION}
    return json_response(body)


async def load(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    body: Load = {"server_load": len(service.admission)}
    return json_response(body)


async def metrics(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    text = service.metrics.render(await _stats(service), len(service.admission), service.settings.vllm_metrics)
    return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE})


async def _stats(service: Service) -> EngineStats | None:
    """None if the engine does not answer soon: it is not ready, dead, or in a step that takes long."""
    if not service.engine.is_running:
        return None
    try:
        async with asyncio.timeout(STATS_SECONDS):
            return await service.engine.stats()
    except (TimeoutError, EngineDeadError):
        return None


ENDPOINTS = (
    Endpoint("GET", "/health", health, "200 if requests are taken, else 503.", response=Health),
    Endpoint("GET", "/ping", health, "The same as /health.", response=Health),
    Endpoint("GET", "/version", version, "The program's version.", response=Version),
    Endpoint("GET", "/load", load, "Requests that are being answered.", response=Load),
    Endpoint("GET", "/metrics", metrics, "Metrics for Prometheus.", media_type="text/plain"),
)
