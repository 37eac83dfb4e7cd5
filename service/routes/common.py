"""What the inference routes share: their state, their limits, waiting for rows, and the answer's form."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
from fastapi import Request, Response

from service.batcher import Rows
from service.errors import ClientGone, TooManyInputs
from service.schemas import ErrorBody
from service.state import ServiceState

HITS_HEADER = "X-AttnCache-Hits"
PROTOTYPE_HITS_HEADER = "X-AttnCache-Prototype-Hits"

_WHAT_HAPPENED = {
    400: "The body, a field or a header is not accepted.",
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
        "description": "Sequences whose attention maps came from the database, of all in the request.",
        "schema": {"type": "string", "examples": ["3/4"]},
    },
    PROTOTYPE_HITS_HEADER: {
        "description": "Those of them whose maps came from a prototype, of all in the request.",
        "schema": {"type": "string", "examples": ["1/4"]},
    },
}


def state_of(request: Request) -> ServiceState:
    """The state of the app that this request came to."""
    return cast(ServiceState, request.app.state.service)


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


def answer(content: Any, rows: Rows) -> Response:
    """200 with the content as JSON and, in headers, how many of the request's sequences hit."""
    sequences = len(rows.outcomes)
    return Response(
        orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY),
        headers={
            HITS_HEADER: f"{rows.hits}/{sequences}",
            PROTOTYPE_HITS_HEADER: f"{rows.prototype_hits}/{sequences}",
        },
        media_type="application/json",
    )
