"""A route for inference: how it is described in /openapi.json, and how a request reaches its function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from service.schemas import ErrorBody
from service.web.call import (
    CALL,
    MODEL_HEADER,
    REQUIRE_MODEL_HEADER,
    REUSE_HEADER,
    TIMEOUT_HEADER,
    Answer,
    Call,
)

HITS_HEADER = "X-AttnCache-Hits"
PROTOTYPE_HITS_HEADER = "X-AttnCache-Prototype-Hits"
CACHED_TOKENS_HEADER = "X-AttnCache-Cached-Tokens"
REPEATED_HEADER = "X-AttnCache-Repeated"
TRUNCATED_HEADER = "X-AttnCache-Truncated"
HISTORY_TOKENS_HEADER = "X-AttnCache-History-Tokens"
SESSION_HEADER = "X-AttnCache-Session"
APPROXIMATE_HEADER = "X-AttnCache-Approximate"
SEGMENTS_HEADER = "X-AttnCache-Segments"

_WHAT_HAPPENED = {
    400: "The body, a field or a header is not accepted.",
    401: "The server needs an API key, and the request has none, or one that is not known.",
    404: "The session is unknown or has expired.",
    409: "The request requires a model that this server does not serve.",
    413: "The body has too many bytes.",
    422: "There are too many inputs, or an input is too long and must not be truncated.",
    429: "The queue is full, or a quota of the API key is used up; `Retry-After` says when to retry.",
    500: "The server failed on this request.",
    503: "The model is still loading; `Retry-After` says when to retry.",
    504: "The request was not answered in time.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _WHAT_HAPPENED.items()
}
ANSWER_HEADERS = {
    HITS_HEADER: {
        "description": "Number of sequences that took attention maps from the database, of all sequences of "
        "the request. Absent with --no-reuse-headers.",
        "schema": {"type": "string", "examples": ["3/4"]},
    },
    PROTOTYPE_HITS_HEADER: {
        "description": "Number of sequences that took attention maps from a prototype, of all sequences of "
        "the request. Absent with --no-reuse-headers.",
        "schema": {"type": "string", "examples": ["1/4"]},
    },
    CACHED_TOKENS_HEADER: {
        "description": "Number of tokens whose keys and values were stored and not computed again, of all "
        "tokens of the request. Absent with --no-reuse-headers, and if the model's keys and values cannot be "
        "reused; /info says why.",
        "schema": {"type": "string", "examples": ["480/560"]},
    },
    REPEATED_HEADER: {
        "description": "Number of sequences whose results were kept, or were computed for another request at "
        "the same time, of all sequences of the request. Absent with --no-reuse-headers.",
        "schema": {"type": "string", "examples": ["2/4"]},
    },
    TRUNCATED_HEADER: {
        "description": "Number of sequences whose texts were too long and were cut, of all sequences of the "
        "request. Only if there are any.",
        "schema": {"type": "string", "examples": ["1/4"]},
    },
    HISTORY_TOKENS_HEADER: {
        "description": "Number of tokens of the session's conversation that the answer is about, of all its "
        "tokens. Only if the conversation did not fit into the model's window and was cut.",
        "schema": {"type": "string", "examples": ["250/612"]},
    },
    SESSION_HEADER: {
        "description": "dropped, if the session's history could not be kept. Then the client sends the next "
        "turn with the whole conversation, as transcript, because an append might be answered about an older "
        "history.",
        "schema": {"type": "string", "enum": ["dropped"]},
    },
    APPROXIMATE_HEADER: {
        "description": "Why the answer may differ from the full model's, one or several of: truncated (the "
        "session's history was cut, and keys and values that depend on the tokens that were cut were used; "
        "only with --session-overflow truncate or keep-sinks), blended (keys and values of chunks were used "
        "out of their context; only with --blend), int8 (keys and values were saved in 8 bits).",
        "schema": {"type": "string", "examples": ["truncated", "blended"]},
    },
    SEGMENTS_HEADER: {
        "description": "For each chunk of a prompt whose chunks were blended: its tokens, how many of them "
        "had stored keys and values, and how many of them were computed again; for the first 64 chunks. "
        "Absent with --no-reuse-headers.",
        "schema": {
            "type": "string",
            "examples": ["257;cached=257;recomputed=0, 256;cached=256;recomputed=33"],
        },
    },
    MODEL_HEADER: {
        "description": "Fingerprint of the model that answers, as in /info. Most errors have the header too.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
}

Handler = Callable[[Call], Awaitable[Answer]]


class Api(NamedTuple):
    """The routes that clients of one kind use, in the documentation."""

    tag: str
    errors: dict[int | str, dict[str, Any]]  # responses by status


OURS = Api("AttnCache", ERRORS)
# Of a route that is about all clients.
FOR_ADMINS: dict[int | str, dict[str, Any]] = {
    401: ERRORS[401],
    403: {"model": ErrorBody, "description": "The API key of the request has not the word `admin`."},
}
# Of a route without ANSWER_HEADERS that asks the model.
ANSWERED_BY: dict[int | str, dict[str, Any]] = {
    200: {"headers": {MODEL_HEADER: ANSWER_HEADERS[MODEL_HEADER]}},
}


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
        api: Api = OURS,
        *,
        reuses: bool = True,
    ) -> None:
        """handle: its name and docstring are the title and the description in the documentation.

        response: the type of the JSON of a response with status 200. says: what such a response holds.
        reuses: whether `handle` reads X-AttnCache-Reuse, and answers with ANSWER_HEADERS.
        """
        super().__init__(
            path,
            handle,
            methods=["POST"],
            name=handle.__name__,
            summary=handle.__name__.replace("_", " ").capitalize(),
            description=handle.__doc__,
            tags=[api.tag],
            response_model=response,
            responses={
                200: {**({"headers": ANSWER_HEADERS} if reuses else ANSWERED_BY[200]), "description": says},
                **api.errors,
            },
            openapi_extra={
                **documented_body(body),
                "parameters": _PARAMETERS if reuses else _PARAMETERS[1:],
            },
        )
        self.body = body
        self._handle, self._reuses = handle, reuses
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer one request, as ASGI application. Raises what the front makes a response of."""
        call: Call = scope[CALL]
        if call.holder is not None:
            await call.count_in_quota(call.holder)
        call.serving()  # what its headers ask for is checked before the body is read
        if self._reuses:
            call.reuse = call.reuse_requested()
        answer = await self._handle(call)
        call.count_answer(len(answer.content))
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
    fields = {name: _inlined(each, definitions) for name, each in part.items() if name != "$ref"}
    if "$ref" not in part:
        return fields
    return {**_inlined(definitions[part["$ref"].rsplit("/", 1)[1]], definitions), **fields}


def documented_parameter(
    name: str, description: str, schema: dict[str, Any], place: str = "header"
) -> dict[str, Any]:
    """Return the OpenAPI description of an optional header, or of a parameter of the query."""
    return {"name": name, "in": place, "required": False, "description": description, "schema": schema}


# The first one is documented for routes that reuse something only.
_PARAMETERS = [
    documented_parameter(
        REUSE_HEADER,
        "off computes every text of the request in full, without reuse. Default: on.",
        {"type": "string", "enum": ["on", "off"], "default": "on"},
    ),
    documented_parameter(
        REQUIRE_MODEL_HEADER,
        "Fingerprint of the model that must answer, or at least its first 8 characters. Status 409 if the "
        "server serves another model.",
        {"type": "string", "pattern": "^[0-9a-fA-F]{8,64}$"},
    ),
    documented_parameter(
        TIMEOUT_HEADER,
        "Seconds that the request may take, at most --request-seconds. Status 504 after that; what was not "
        "computed yet is dropped.",
        {"type": "number", "exclusiveMinimum": 0},
    ),
]
