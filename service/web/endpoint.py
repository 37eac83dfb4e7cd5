"""The routes for inference: what each of them does, and what the documentation says about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from attncache_core import AttnCacheError
from service.errors import ours
from service.web.call import REQUIRE_MODEL_HEADER, REUSE_HEADER, TIMEOUT_HEADER, Answer, Call

Handler = Callable[[Call], Awaitable[Answer]]
# Returns the JSON of an error.
ErrorShape = Callable[[AttnCacheError], Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route for inference: POST to `path`."""

    path: str
    handle: Handler  # its name and docstring are the title and the description in the documentation
    request: type[BaseModel]  # the body
    response: Any  # the type of the JSON of a response with status 200
    says: str  # what a response with status 200 holds
    headers: dict[str, Any] = field(default_factory=dict)  # of a response with status 200
    errors: dict[int | str, dict[str, Any]] = field(default_factory=dict)  # responses by status
    error_shape: ErrorShape = ours
    tag: str = "AttnCache"
    reuses: bool = True  # whether the handler reads X-AttnCache-Reuse


def document(app: FastAPI, endpoints: Sequence[Endpoint]) -> None:
    """Add endpoints to the app's documentation, and their paths to the paths that the app knows."""
    for endpoint in endpoints:
        name = endpoint.handle.__name__
        app.add_api_route(
            endpoint.path,
            _answered_by_front,
            methods=["POST"],
            name=name,
            summary=name.replace("_", " ").capitalize(),
            description=endpoint.handle.__doc__,
            tags=[endpoint.tag],
            response_model=endpoint.response,
            responses={200: {"headers": endpoint.headers, "description": endpoint.says}, **endpoint.errors},
            openapi_extra={
                **documented_body(endpoint.request),
                "parameters": [own for own in _PARAMETERS if endpoint.reuses or own["name"] != REUSE_HEADER],
            },
        )


def documented_body(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that a route reads by `Call.read`."""
    described = schema.model_json_schema()
    content = {"application/json": {"schema": _inlined(described, described.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(part: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a JSON schema with its definitions in place of references to them."""
    if isinstance(part, list):
        return [_inlined(each, definitions) for each in part]
    if not isinstance(part, dict):
        return part
    own = {name: _inlined(each, definitions) for name, each in part.items() if name != "$ref"}
    if "$ref" not in part:
        return own
    return {**_inlined(definitions[part["$ref"].rsplit("/", 1)[1]], definitions), **own}


async def _answered_by_front() -> None:
    raise AssertionError("Front answers the endpoints before the app sees them")


def _parameter(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


_PARAMETERS = [
    _parameter(
        REUSE_HEADER,
        "off computes every text of the request in full, without reuse. Default: on.",
        {"type": "string", "enum": ["on", "off"], "default": "on"},
    ),
    _parameter(
        REQUIRE_MODEL_HEADER,
        "Fingerprint of the model that must answer, or at least its first 8 characters. Status 409 if the "
        "server serves another model.",
        {"type": "string", "pattern": "^[0-9a-fA-F]{8,64}$"},
    ),
    _parameter(
        TIMEOUT_HEADER,
        "Seconds that the request may take, at most --request-seconds. Status 504 after that; what was not "
        "computed yet is dropped.",
        {"type": "number", "exclusiveMinimum": 0},
    ),
]
