"""What holds for every request: who sent it, how it is counted, and which response an error gets.

    socket -> uvicorn -> Front -> an Endpoint: read, compute, answer
                               -> FastAPI: everything else

The routes for inference are answered here, by a look into a table, because FastAPI's way to a route and back
takes several times as long as a request of one text may wait for anything but its computation.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from collections.abc import Mapping

import orjson
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attncache_core import AttnCacheError
from service.access.keys import ADMIN, KeyHolder
from service.errors import Forbidden, InternalError, QuotaExceeded, headers_of, log_failure
from service.observability.finished import FinishedRequest
from service.observability.logs import REQUEST_ID
from service.observability.metrics import route_of
from service.observability.tracing import TRACE_HEADERS
from service.state import ServiceState
from service.web.call import MODEL_HEADER, REQUEST_ID_HEADER, Answer, AnsweredElsewhere, Call, Client, Team
from service.web.connection import HEALTH_PATHS
from service.web.endpoint import Endpoint, ErrorShape
from service.web.error_shapes import shape_of
from service.web.listeners import CONNECTION, LISTENER, ListenerName

logger = logging.getLogger(__name__)

# Key in a request's ASGI scope: its Call.
CALL = "attncache.call"
# The status that the metrics show for a request that was not answered.
_NOT_ANSWERED = 499
# The page is open because a browser cannot send a key with a link. What the page shows needs a key.
_PAGE, _FILES_OF_PAGE = "/", "/page/"
# On the admin listener, Prometheus reads the metrics without a key.
_METRICS_PATH = "/metrics"
# What concerns all clients, with all that is below it.
_ADMIN_PATHS = (_METRICS_PATH, "/cache", "/explain")
_BELOW_ADMIN_PATHS = tuple(f"{path}/" for path in _ADMIN_PATHS)
_NUMBERS = itertools.count()
# Without spaces, so that an id is one word of a log line.
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Front:
    """ASGI application around the app, for HTTP.

    An exception never gets past it, because servers log exceptions.
    """

    def __init__(
        self, app: ASGIApp, *, state: ServiceState, endpoints: Mapping[str, Endpoint], team: Team | None
    ) -> None:
        self._app = app
        self._state = state
        self._endpoints = endpoints
        self._team = team
        # The beginning of all request ids, because random digits for each request cost a system call.
        self._own_ids = secrets.token_hex(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        headers = dict(scope["headers"])
        client = Client((scope.get(CONNECTION, scope.get("client")),))
        call = Call(
            scope, receive, self._state, headers, client, _request_id(headers, self._own_ids), self._team
        )
        REQUEST_ID.set(call.request_id)
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        status = _NOT_ANSWERED
        try:
            answer = self._refused(call, endpoint) if self._state.keys is not None else None
            if answer is None and endpoint is not None:
                answer = await _answer(endpoint, call)
            if answer is None:
                status = await self._pass_on(call, send)
            else:
                status = answer.status
                await _send(answer, call, send)
        finally:
            self._finish(call, status)

    async def answer(self, call: Call) -> Answer:
        """Return the answer to a request that another worker has admitted, and will count."""
        endpoint = self._endpoints.get(call.scope["path"]) if call.scope["method"] == "POST" else None
        if endpoint is not None:
            return await _answer(endpoint, call)
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        status = await self._pass_on(call, keep)
        return Answer(b"".join(message.get("body", b"") for message in messages), status=status)

    def _refused(self, call: Call, endpoint: Endpoint | None) -> Answer | None:
        """Find out whose key the request has. Returns the response to a request without rights."""
        try:
            self._admit(call, is_counted=endpoint is not None)
        except AttnCacheError as error:
            return _refusal(error, shape_of(call.scope["path"]))
        return None

    def _admit(self, call: Call, *, is_counted: bool) -> None:
        """Raise Unauthorized, Forbidden or QuotaExceeded. is_counted: whether quotas count the request."""
        scope, keys = call.scope, self._state.keys
        if keys is None or is_open(scope["method"], scope["path"], scope.get(LISTENER)):
            return
        call.holder = holder = keys.holder(call.headers)
        check_admin(scope["path"], holder)
        call.client = Client((holder.name, *call.client.flow), holder.namespace)
        if is_counted:
            try:
                holder.use.begin()
            except QuotaExceeded as error:
                self._state.metrics.observe_quota_refusal(holder.name, error.quota)
                raise
            call.is_in_quota = True

    def _finish(self, call: Call, status: int) -> None:
        """Count a request that was answered or given up."""
        state, ended = self._state, time.perf_counter()
        state.bodies.give(call.body_bytes)
        state.metrics.observe_request(call.scope["path"], status, ended - call.started)
        if call.holder is not None:
            tokens = sum(result.asked_tokens for result in call.results)
            state.metrics.observe_key(call.holder.name, tokens)
            if call.is_in_quota:
                call.holder.use.end(tokens)
        if state.finished is not None:
            state.finished.add(_finished(call, status, ended))

    async def _pass_on(self, call: Call, send: Send) -> int:
        """Let the app answer. Returns the status of its response."""
        status = _NOT_ANSWERED

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = call.request_id
                if call.answered_by is not None:
                    headers[MODEL_HEADER] = call.answered_by
            await send(message)

        call.scope[CALL] = call
        try:
            await self._app(call.scope, call.receive, send_noting_status)
        except Exception as error:
            log_failure(logger, "a request failed", error)
            if status is _NOT_ANSWERED:
                status = InternalError.status
                await _send(_refusal(InternalError(), shape_of(call.scope["path"])), call, send)
        return status


def is_open(method: str, path: str, listener: ListenerName | None) -> bool:
    """Return whether a request needs no key, also if keys are set."""
    if path in HEALTH_PATHS or (path == _METRICS_PATH and listener == "admin"):
        return True
    # POST / computes.
    return method in ("GET", "HEAD") and (path == _PAGE or path.startswith(_FILES_OF_PAGE))


def check_admin(path: str, holder: KeyHolder) -> None:
    """Raise Forbidden if the path is for admin keys, and the holder has none."""
    if not holder.is_admin and (path in _ADMIN_PATHS or path.startswith(_BELOW_ADMIN_PATHS)):
        raise Forbidden(
            f"this path is about all clients and needs a key with the word {ADMIN} in the file of --api-keys"
        )


async def _answer(endpoint: Endpoint, call: Call) -> Answer:
    try:
        return await endpoint.handle(call)
    except AnsweredElsewhere as elsewhere:
        return elsewhere.answer
    except AttnCacheError as error:
        return _refusal(error, endpoint.error_shape)
    except Exception as error:
        log_failure(logger, "a request failed", error)
        return _refusal(InternalError(), endpoint.error_shape)


def _refusal(error: AttnCacheError, shape: ErrorShape) -> Answer:
    headers = tuple((name.lower().encode(), value.encode()) for name, value in headers_of(error).items())
    return Answer(orjson.dumps(shape(error)), headers, error.status)


async def _send(answer: Answer, call: Call, send: Send) -> None:
    headers = [
        (b"content-type", answer.media_type),
        (b"content-length", b"%d" % len(answer.content)),
        (b"x-request-id", call.request_id.encode()),
        *answer.headers,
    ]
    if call.answered_by is not None:
        headers.append((MODEL_HEADER.lower().encode(), call.answered_by.encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.content})


def _request_id(headers: Mapping[bytes, bytes], own_ids: str) -> str:
    """Return the id that the client has given to its request, if it is visible ASCII, or a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return f"{own_ids}{next(_NUMBERS):010x}"


def _finished(call: Call, status: int, ended: float) -> FinishedRequest:
    """Return what the access log and the traces tell of a request."""
    results = call.results
    return FinishedRequest(
        call.request_id,
        call.scope["method"],
        route_of(call.scope["path"]),
        status,
        call.started,
        ended,
        time.time(),
        None if call.holder is None else call.holder.name,
        sum(len(result.outcomes) for result in results),
        sum(result.asked_tokens for result in results),
        sum(result.cached_tokens for result in results),
        sum(result.repeated for result in results),
        [result.timing for result in results],
        {name.decode(): call.headers[name].decode("latin-1") for name in TRACE_HEADERS & call.headers.keys()},
    )
