"""The routes for inference: how they are answered, and what the documentation says about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from service.web.call import (
    CALL,
    REQUIRE_MODEL_HEADER,
    REUSE_HEADER,
    TIMEOUT_HEADER,
    Answer,
    Call,
)

Handler = Callable[[Call], Awaitable[Answer]]


class InferenceRoute(APIRoute):
    """A route of the app that computes: POST to `path`.

    FastAPI documents the route like its other ones, and the front finds it. The request reaches the function
    without FastAPI's dependency injection, which takes several times as long as all else that happens to a
    request of one text beside its computation.
    """

    def __init__(
        self,
        path: str,
        handle: Handler,
        body: type[BaseModel],
        response: Any,
        says: str,
        *,
        headers: dict[str, Any] | None = None,
        errors: dict[int | str, dict[str, Any]] | None = None,
        tag: str = "AttnCache",
        reuses: bool = True,
    ) -> None:
        """handle: its name and docstring are the title and the description in the documentation.

        response: the type of the JSON of a response with status 200. says, headers: what such a response
        holds. errors: responses by status. reuses: whether `handle` reads X-AttnCache-Reuse.
        """
        super().__init__(
            path,
            handle,
            methods=["POST"],
            name=handle.__name__,
            summary=handle.__name__.replace("_", " ").capitalize(),
            description=handle.__doc__,
            tags=[tag],
            response_model=response,
            responses={200: {"headers": headers or {}, "description": says}, **(errors or {})},
            openapi_extra={
                **documented_body(body),
                "parameters": [own for own in _PARAMETERS if reuses or own["name"] != REUSE_HEADER],
            },
        )
        self.body = body
        self._handle = handle
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer one request, as ASGI application. Raises what the front makes a response of."""
        call: Call = scope[CALL]
        await call.count_in_quota()
        answer = await self._handle(call)
        await answer.send(send)


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
