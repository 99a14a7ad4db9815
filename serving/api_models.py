"""/v1/models."""

from __future__ import annotations

from typing import Literal, TypedDict

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.errors import json_response
from jaxllm.serving.service import Service


class ModelCard(TypedDict):
    """A name that requests may call the model by."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    permission: list[str]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


async def list_models(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    body: ModelList = {"object": "list", "data": [_card(service, name) for name in service.model_names]}
    return json_response(body)


async def get_model(request: Request) -> ASGIApp:
    service: Service = request.app.state.service
    service.check_ready()
    name = request.path_params["model"]
    service.check_model(name)
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "jaxllm",
        "root": service.model_path,
        "parent": None,
        "max_model_len": service.max_model_len,
        "permission": [],
    }


ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, "The names of the model.", response=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", get_model, "The model of a name.", response=ModelCard, statuses=(404,)),
)
