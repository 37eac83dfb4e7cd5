"""Pass a request on to another worker, and answer the requests that others pass on.

    the worker that the client reached            the worker that answers
    key, quotas, limits, request id
    pass_on  ------------------------------->     answer_passed: the route
    counts, logs and answers  <-------------      status, headers, body; what was computed

Whatever happens once per request happens in the first worker. The second one counts only what it computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from starlette.types import Message as AsgiMessage

from attncache_core import Outcome
from service.batching.pending_request import RequestResult
from service.observability.finished import Timing
from service.observability.logs import REQUEST_ID
from service.state import ServiceState
from service.web.call import Answer, Call, Client, Team
from service.web.listeners import LISTENER
from service.workers.messages import Message, Peer

_OUR_HEADERS = b"x-attncache-"


class Passed(NamedTuple):
    """What another worker has answered, and what it has computed."""

    answer: Answer
    results: list[RequestResult]  # without outputs


async def pass_on(call: Call, content: bytes, peer: Peer) -> Passed:
    """Return the answer of another worker. content: the body of the request.

    If the client leaves or the deadline passes, the other worker drops the request. Raises WorkerUnavailable,
    ClientGone and DeadlineExceeded.
    """
    ours = ((name, value) for name, value in call.headers.items() if name.startswith(_OUR_HEADERS))
    question = Message(
        {
            "kind": "request",
            "method": call.scope["method"],
            "path": call.scope["path"],
            "headers": _texts(ours),
            "flow": call.client.flow,
            "namespace": call.client.namespace.decode("latin-1"),
            "request_id": call.request_id,
            "started": call.started,
        },
        content,
    )
    pending: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(peer.ask(question))
    asking.add_done_callback(lambda asked: _hand_over(asked, pending))
    try:
        answered = await call.wait(pending)
    finally:
        asking.cancel()
    fields = answered.fields
    answer = Answer(
        answered.body, tuple(_bytes(fields["headers"])), fields["status"], fields["media_type"].encode()
    )
    return Passed(answer, [_result_of(result) for result in fields["results"]])


async def answer_passed(
    question: Message,
    gone: asyncio.Event,
    state: ServiceState,
    answering: Callable[[Call], Awaitable[Answer]],
    team: Team,
) -> Message:
    """Answer a request that another worker has passed on. gone: set if nobody waits any more."""
    fields = question.fields
    messages: list[AsgiMessage] = [{"type": "http.request", "body": question.body}]

    async def receive() -> AsgiMessage:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    headers = list(_bytes(fields["headers"]))
    scope = {
        "type": "http",
        "method": fields["method"],
        "path": fields["path"],
        "query_string": b"",
        "headers": headers,
        # Whether the route is for operators was found out by the first worker.
        LISTENER: "admin",
    }
    client = Client(_flow(fields["flow"]), fields["namespace"].encode("latin-1"))
    call = Call(
        scope,
        receive,
        state,
        dict(headers),
        client,
        fields["request_id"],
        team,
        is_passed_on=True,
        started=fields["started"],
    )
    REQUEST_ID.set(call.request_id)
    try:
        answer = await answering(call)
    finally:
        state.bodies.give(call.body_bytes)
    return Message(
        {
            "status": answer.status,
            "media_type": answer.media_type.decode(),
            "headers": _texts(answer.headers),
            "results": [_told_of(result) for result in call.results],
        },
        answer.content,
    )


def _hand_over(asked: asyncio.Task[Message], pending: asyncio.Future[Message]) -> None:
    error = None if asked.cancelled() else asked.exception()
    if pending.done() or asked.cancelled():
        return
    if error is not None:
        pending.set_exception(error)
    else:
        pending.set_result(asked.result())


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _bytes(headers: Iterable[tuple[str, str]]) -> Iterable[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _flow(flow: Any) -> Any:
    """Return the name of a flow, whose tuples JSON has made lists."""
    return tuple(map(_flow, flow)) if isinstance(flow, list) else flow


def _told_of(result: RequestResult) -> dict[str, Any]:
    """Return what counts, logs and traces need of a result."""
    return {
        "outcomes": result.outcomes,
        "asked_tokens": result.asked_tokens,
        "cached_tokens": result.cached_tokens,
        "repeated": result.repeated,
        "timing": asdict(result.timing),
    }


def _result_of(told: Mapping[str, Any]) -> RequestResult:
    return RequestResult(
        np.empty((0, 0), np.float32),
        tuple(map(Outcome, told["outcomes"])),
        asked_tokens=told["asked_tokens"],
        cached_tokens=told["cached_tokens"],
        repeated=told["repeated"],
        timing=Timing(**told["timing"]),
    )
