"""The OpenAI-compatible server as an ASGI application.

The invariant: routes and their documentation come from the same `ENDPOINTS`, and whatever a route raises becomes
OpenAI's error body.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllm.engine.async_llm import EngineDeadError
from jaxllm.serving import api_admin, api_chat, api_completions, api_health, api_models, api_profile, api_tokenize
from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.errors import ApiError, handle_error, json_response
from jaxllm.serving.middleware import REQUEST_ID_HEADER, KeyRequired, Observed
from jaxllm.serving.openapi import make_openapi
from jaxllm.serving.service import VERSION, Service

ENDPOINTS: tuple[Endpoint, ...] = (
    *api_chat.ENDPOINTS,
    *api_completions.ENDPOINTS,
    *api_models.ENDPOINTS,
    *api_tokenize.ENDPOINTS,
    *api_health.ENDPOINTS,
    *api_admin.ENDPOINTS,
    *api_profile.ENDPOINTS,
)
OPENAPI_PATH = "/openapi.json"
_TOLD = (ApiError, HTTPException, ValueError, TimeoutError, EngineDeadError)


def create_app(service: Service) -> Starlette:
    """The application; `service` is reached as `app.state.service`."""
    routes = [Route(one.path, one.handler, methods=[one.method]) for one in ENDPOINTS]
    app = Starlette(
        routes=[*routes, Route(OPENAPI_PATH, _openapi)],
        middleware=_middleware(service),
        exception_handlers=dict.fromkeys(_TOLD, handle_error),
    )
    app.state.service = service
    return app


def _middleware(service: Service) -> list[Middleware]:
    settings = service.settings
    paths = [*(one.path for one in ENDPOINTS), OPENAPI_PATH]
    middleware = [Middleware(Observed, metrics=service.metrics, routes=paths)]
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_credentials=settings.allow_credentials,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER],
            )
        )
    if settings.api_key:
        middleware.append(Middleware(KeyRequired, keys=settings.api_key))
    return middleware


async def _openapi(request: Request) -> ASGIApp:
    return json_response(make_openapi(ENDPOINTS, VERSION))
