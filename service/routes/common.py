"""What the inference routes share: which model serves, limits, waiting for rows, and the answer's form."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import orjson
from fastapi import Request, Response

from attncache_core import InvalidInput
from service.batcher import Rows
from service.bodies import REQUIRE_MODEL_HEADER
from service.errors import ClientGone, ModelMismatch, TooManyInputs
from service.schemas import ErrorBody
from service.settings import Settings
from service.state import ServiceState, Serving

HITS_HEADER = "X-AttnCache-Hits"
PROTOTYPE_HITS_HEADER = "X-AttnCache-Prototype-Hits"
MODEL_HEADER = "X-AttnCache-Model"
# Key in the scope of a request: the fingerprint that its answer names in MODEL_HEADER.
ANSWERED_BY = "attncache.answered_by"

_WHAT_HAPPENED = {
    400: "The body, a field or a header is not accepted.",
    409: "Another model is served than the one that the request requires.",
    413: "The body has too many bytes.",
    422: "Too many inputs, or one that is too long and must not be truncated.",
    429: "The queue is full; `Retry-After` says when to come again.",
    500: "The server failed on this request.",
    503: "The model is still being loaded; `Retry-After` says when to come again.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _WHAT_HAPPENED.items()
}
ANSWER_HEADERS = {
    HITS_HEADER: {
        "description": "Sequences whose attention maps came from the database, of all in the request. "
        "Absent with --no-reuse-headers.",
        "schema": {"type": "string", "examples": ["3/4"]},
    },
    PROTOTYPE_HITS_HEADER: {
        "description": "Those whose maps came from a prototype, of all in the request. Absent with "
        "--no-reuse-headers.",
        "schema": {"type": "string", "examples": ["1/4"]},
    },
    MODEL_HEADER: {
        "description": "Fingerprint of the model that answers, as in /info; on errors too.",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    },
}
# Shorter ones could begin the fingerprint of another model too.
_PINNED = re.compile("[0-9a-f]{8,64}")


def state_of(request: Request) -> ServiceState:
    """The state of the app that this request came to."""
    return cast(ServiceState, request.app.state.service)


def serving_of(request: Request) -> Serving:
    """The engine and batcher that serve this request.

    Raises NotReady while they are being loaded, ModelMismatch if the request requires another model, and
    InvalidInput if it names none.
    """
    state = state_of(request)
    serving = state.serving()
    fingerprint = serving.engine.fingerprint
    request.scope[ANSWERED_BY] = fingerprint
    required = request.headers.get(REQUIRE_MODEL_HEADER, fingerprint).strip().lower()
    if not _PINNED.fullmatch(required):
        raise InvalidInput(
            f"{REQUIRE_MODEL_HEADER} must be a model's fingerprint, or at least its first 8 characters, as "
            f"{MODEL_HEADER} and /info show it",
            field=REQUIRE_MODEL_HEADER,
        )
    if not fingerprint.startswith(required):
        raise ModelMismatch(
            f"this server answers with {state.settings.model}, fingerprint {fingerprint[:12]}, and the "
            "request requires another model; ask a server of that model, or compute stored embeddings again "
            f"with this one and require its fingerprint, which {MODEL_HEADER} holds",
            field=REQUIRE_MODEL_HEADER,
        )
    return serving


def check_count(texts: list[str], field: str, limit: int) -> None:
    """Raise TooManyInputs if there are more texts than one request may hold."""
    if len(texts) > limit:
        raise TooManyInputs(f"{field} must have at most {limit} texts a request", field=field)


async def rows_unless_gone(request: Request, rows: asyncio.Future[Rows]) -> Rows:
    """The rows when they are there; raises ClientGone, and gives up the rows, if the client leaves before."""
    watch = asyncio.ensure_future(_give_up_when_gone(request, rows))
    try:
        return await rows
    finally:
        watch.cancel()


async def _give_up_when_gone(request: Request, rows: asyncio.Future[Rows]) -> None:
    # The body has been read, so the next message can only be the client's leaving.
    await request.receive()
    if not rows.done():
        rows.set_exception(ClientGone("the client left before its answer"))


def answer(content: Any, rows: Rows, settings: Settings) -> Response:
    """200 with the content as JSON and, unless settings withhold it, how many sequences hit, in headers."""
    headers = {}
    if settings.reuse_headers:
        sequences = len(rows.outcomes)
        headers[HITS_HEADER] = f"{rows.hits}/{sequences}"
        headers[PROTOTYPE_HITS_HEADER] = f"{rows.prototype_hits}/{sequences}"
    dumped = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(dumped, headers=headers, media_type="application/json")
