"""Shared parts of the inference routes: the required model, limits, waiting for a result, the response."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar, cast

import orjson
from fastapi import Request, Response

from attncache_core import InvalidInput
from service.batching.pending_request import RequestResult
from service.batching.sources import Source
from service.conversations.conversation import Conversation
from service.errors import ClientGone, ModelMismatch, TooManyInputs
from service.schemas import ErrorBody
from service.state import ServiceState, Serving
from service.web.bodies import REQUIRE_MODEL_HEADER

HITS_HEADER = "X-AttnCache-Hits"
PROTOTYPE_HITS_HEADER = "X-AttnCache-Prototype-Hits"
CACHED_TOKENS_HEADER = "X-AttnCache-Cached-Tokens"
HISTORY_TOKENS_HEADER = "X-AttnCache-History-Tokens"
APPROXIMATE_HEADER = "X-AttnCache-Approximate"
MODEL_HEADER = "X-AttnCache-Model"
# Key in a request's ASGI scope: the fingerprint that the response has in MODEL_HEADER.
ANSWERED_BY = "attncache.answered_by"

_WHAT_HAPPENED = {
    400: "The body, a field or a header is not accepted.",
    404: "The session is unknown or has expired.",
    409: "The request requires a model that this server does not serve.",
    413: "The body has too many bytes.",
    422: "There are too many inputs, or an input is too long and must not be truncated.",
    429: "The queue is full; `Retry-After` says when to retry.",
    500: "The server failed on this request.",
    503: "The model is still loading; `Retry-After` says when to retry.",
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
    HISTORY_TOKENS_HEADER: {
        "description": "Number of tokens of the session's conversation that the answer is about, of all its "
        "tokens. Only if the conversation did not fit into the model's window and was cut.",
        "schema": {"type": "string", "examples": ["250/612"]},
    },
    APPROXIMATE_HEADER: {
        "description": "truncated: the session's history was cut, and keys and values that depend on the "
        "tokens that were cut were used. Only with --session-overflow truncate or keep-sinks.",
        "schema": {"type": "string", "enum": ["truncated"]},
    },
    MODEL_HEADER: {
        "description": "Fingerprint of the model that answers, as in /info. Error responses have the header "
        "too.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
}
T = TypeVar("T")
# A shorter beginning could be the beginning of another model's fingerprint too.
_PINNED = re.compile("[0-9a-f]{8,64}")


def state_of(request: Request) -> ServiceState:
    """Return the state of the app that received this request."""
    return cast(ServiceState, request.app.state.service)


def serving_of(request: Request) -> Serving:
    """Return the engine and the other parts that serve this request.

    Raises NotReady while the engine is loading, ModelMismatch if the request requires another model, and
    InvalidInput if the required fingerprint is malformed.
    """
    state = state_of(request)
    serving = state.serving()
    fingerprint = serving.engine.fingerprint
    request.scope[ANSWERED_BY] = fingerprint
    required = request.headers.get(REQUIRE_MODEL_HEADER, fingerprint).strip().lower()
    if not _PINNED.fullmatch(required):
        raise InvalidInput(
            f"{REQUIRE_MODEL_HEADER} must be a model's fingerprint, or at least its first 8 characters; "
            f"{MODEL_HEADER} and /info show the fingerprint",
            field=REQUIRE_MODEL_HEADER,
        )
    if not fingerprint.startswith(required):
        raise ModelMismatch(
            f"this server serves {state.settings.model}, fingerprint {fingerprint[:12]}, and the request "
            "requires another model; send the request to a server of that model, or compute stored "
            f"embeddings again with this model and require its fingerprint, which {MODEL_HEADER} holds",
            field=REQUIRE_MODEL_HEADER,
        )
    return serving


def check_count(texts: list[str], field: str, limit: int) -> None:
    """Raise TooManyInputs if a request has more texts than allowed. field: the field with the texts."""
    if len(texts) > limit:
        raise TooManyInputs(f"{field} must have at most {limit} texts per request", field=field)


async def result_unless_gone(request: Request, pending: asyncio.Future[T]) -> T:
    """Wait for a result. If the client leaves before, cancel the work and raise ClientGone."""
    watch = asyncio.ensure_future(_give_up_when_gone(request, pending))
    try:
        return await pending
    finally:
        watch.cancel()


async def _give_up_when_gone(request: Request, pending: asyncio.Future[T]) -> None:
    # The body has been read, so the next message can only say that the client has disconnected.
    await request.receive()
    if not pending.done():
        pending.set_exception(ClientGone("the client left before its answer"))


def answer(content: Any, result: RequestResult, state: ServiceState, source: Source) -> Response:
    """Return a response with status 200, the content as JSON and, if enabled, what was reused in headers.

    source: what was computed; headers say what was cut from a conversation.
    """
    headers = _of_conversation(source) if isinstance(source, Conversation) else {}
    key_values = state.serving().engine.key_values
    if key_values and key_values.approximation and result.cached_tokens:
        kinds = [headers.get(APPROXIMATE_HEADER), key_values.approximation]
        headers[APPROXIMATE_HEADER] = ", ".join(filter(None, kinds))
    if state.settings.reuse_headers:
        sequences = len(result.outcomes)
        headers[HITS_HEADER] = f"{result.hits}/{sequences}"
        headers[PROTOTYPE_HITS_HEADER] = f"{result.prototype_hits}/{sequences}"
        if key_values:
            headers[CACHED_TOKENS_HEADER] = f"{result.cached_tokens}/{result.asked_tokens}"
    dumped = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(dumped, headers=headers, media_type="application/json")


def _of_conversation(conversation: Conversation) -> dict[str, str]:
    """Return the headers that say how the answer differs from an answer about the whole conversation."""
    headers = {}
    if conversation.following.dropped:
        headers[HISTORY_TOKENS_HEADER] = f"{conversation.kept_tokens}/{conversation.following.tokens}"
    if conversation.approximate:
        headers[APPROXIMATE_HEADER] = "truncated"
    return headers
