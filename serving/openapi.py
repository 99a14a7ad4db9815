"""/openapi.json, made from the endpoints and the types of their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from jaxllm.serving.endpoint import Endpoint
from jaxllm.serving.errors import ErrorBody

_REFERENCE = "#/components/schemas/{model}"
_EVERYWHERE = (401, 500, 503)
_WITH_BODY = (400, 408, 413, 415)
_PARAMETER = re.compile(r"\{(\w+):path\}")


def make_openapi(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """The description in OpenAPI 3.1."""
    endpoints = list(endpoints)
    schemas = _Schemas(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        path = _PARAMETER.sub(r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxllm", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(one: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": one.summary, "operationId": getattr(one.handler, "__name__", one.path)}
    operation["operationId"] += "" if one.path != "/ping" else "_ping"
    if names := _PARAMETER.findall(one.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if one.request is not None:
        content = {"application/json": {"schema": schemas.of(one.request)}}
        operation["requestBody"] = {"required": True, "content": content}
    success: dict[str, Any] = {one.media_type: {"schema": schemas.of(one.response)}}
    if one.chunk is not None:
        success["text/event-stream"] = {"schema": _event_schema(schemas.of(one.chunk))}
    responses = {"200": {"description": "Success", "content": success}}
    statuses = {*_EVERYWHERE, *one.statuses, *(_WITH_BODY if one.request is not None else ())}
    for status in sorted(statuses):
        error = {"application/json": {"schema": schemas.of(ErrorBody)}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    return operation | {"responses": responses}


def _event_schema(chunk: dict[str, Any]) -> dict[str, Any]:
    """Of one server-sent event."""
    part = {"type": "string", "contentMediaType": "application/json", "contentSchema": chunk}
    data = {
        "anyOf": [{"const": "[DONE]"}, part],
        "description": "A part of the answer, or an error; [DONE] is the last.",
    }
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


class _Schemas:
    """JSON schemas of all bodies, each under its name."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        adapters: dict[Any, tuple[Any, JsonSchemaMode, TypeAdapter]] = {}
        for one in endpoints:
            if one.request is not None:
                adapters[one.request] = (one.request, "validation", TypeAdapter(one.request))
        for kind in (ErrorBody, *(one.response for one in endpoints), *(one.chunk for one in endpoints)):
            if kind is not None:
                adapters[str(kind)] = (kind, "serialization", TypeAdapter(kind))
        found, shared = TypeAdapter.json_schemas(adapters.values(), ref_template=_REFERENCE)
        self._by_type = {str(key): schema for (key, _), schema in found.items()}
        self.definitions = shared.get("$defs", {})

    def of(self, kind: Any) -> dict[str, Any]:
        """Text where there is no type."""
        return {"type": "string"} if kind is None else self._by_type[str(kind)]
