"""What holds for every request: who sent it, how it is counted, and which response an error gets.

    socket -> uvicorn -> Front -> an inference route, or the router of FastAPI -> a response

The front takes the place of the middleware of FastAPI, so that errors become responses in one place only. The
JSON of an error has the shape that the clients of its path read:

    this server's own                          {"error": {"code", "message", "field"}}
    OpenAI's, on /v1 and /v2                   {"error": {"message", "type", "param", "code"}}
    the same, on /v1/rerank and /v2/rerank     {"error": {...}, "detail"}
    that of text-embeddings-inference (TEI)    {"error", "error_type"}
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attncache_core import AttnCacheError, InputTooLong
from service.access.keys import ADMIN, KeyHolder
from service.errors import (
    Forbidden,
    InternalError,
    MethodNotAllowed,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Unauthorized,
    UnknownModel,
    headers_of,
    log_failure,
    ours,
)
from service.observability.finished import FinishedRequest
from service.observability.logs import REQUEST_ID
from service.observability.metrics import route_of
from service.observability.tracing import TRACE_HEADERS
from service.settings import Settings
from service.state import ServiceState
from service.web.call import CALL, MODEL_HEADER, NOT_ANSWERED, Answer, Call
from service.web.connection import HEALTH_PATHS
from service.web.listeners import CONNECTION, LISTENER, ListenerName, is_among, is_for_operators
from service.web.proxies import TrustedProxies

logger = logging.getLogger(__name__)

_MODEL_HEADER = MODEL_HEADER.lower().encode()
# The page is open because a browser cannot send a key with a link. What the page shows needs a key.
_PAGE, _FILES_OF_PAGE = "/", "/page/"
# On the admin listener, Prometheus reads the metrics without a key.
_METRICS_PATH = "/metrics"
# What concerns all clients, with all that is below it.
_ADMIN_PATHS = (_METRICS_PATH, "/cache", "/explain")
_NO_SUCH_PATH = "no such path; /docs lists the paths"
_NUMBERS = itertools.count()
# Without spaces, so that an id is one word of a log line.
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
# A page of another origin may read these headers of a response.
_EXPOSED = [
    *("Retry-After", "X-Should-Retry", "X-Request-Id"),
    *("X-AttnCache-Hits", "X-AttnCache-Prototype-Hits", "X-AttnCache-Cached-Tokens", "X-AttnCache-Repeated"),
    *("X-AttnCache-Session", "X-AttnCache-History-Tokens", "X-AttnCache-Approximate"),
    *("X-AttnCache-Truncated", "X-AttnCache-Segments", "X-AttnCache-Error", "X-AttnCache-Model"),
]
# Smaller responses fit into a few packets anyway.
_MIN_GZIP_BYTES = 8 * 1024
# Numbers written as text hardly become smaller at higher levels, and the event loop waits meanwhile.
_GZIP_LEVEL = 1
_NO_GZIP = re.compile(r"gzip\s*;\s*q\s*=\s*0(\.0*)?\s*(,|$)", re.IGNORECASE)
# Clients of OpenAI read these codes.
_OPENAI_CODES = {
    Unauthorized.code: "invalid_api_key",
    UnknownModel.code: "model_not_found",
    InputTooLong.code: "context_length_exceeded",
    QueueFull.code: "rate_limit_exceeded",
    QuotaExceeded.code: "rate_limit_exceeded",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_TEI_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Overloaded"}
# The paths of TEI that this server has no older route of its own for.
_TEI_PATHS = frozenset({"/", "/embed_all", "/predict", "/similarity", "/rerank", "/tokenize", "/decode"})
_OPENAI_PREFIXES = ("/v1/", "/v2/")
_RERANK_PATHS = frozenset({"/v1/rerank", "/v2/rerank"})


class Front(FastAPI):
    """The app, as FastAPI documents it, with one way through it for every HTTP request.

    An exception never gets past it, because servers log exceptions.
    """

    def __init__(self, state: ServiceState, inference: Sequence[APIRoute], **more: Any) -> None:
        """inference: the routes that compute. more: as for FastAPI."""
        super().__init__(**more)
        self.state.service = self._service = state
        self.router.routes.extend(inference)
        # By path, so that no router compares the path of a request with one route after the other.
        self._inference: dict[str, ASGIApp] = {route.path: route.app for route in inference}
        # FastAPI keeps in the stack what its other routes open for a request.
        self._others = AsyncExitStackMiddleware(self.router)
        # The beginning of all request ids, because random digits for each request cost a system call.
        self._own_ids = secrets.token_hex(8)
        proxies = state.settings.trusted_proxies
        self._proxies = None if proxies is None else TrustedProxies.of(proxies)
        self._answer_browsers = _for_browsers(self._answer, state.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request, or run the app from its start to its end."""
        if scope["type"] == "http":
            scope["app"] = self
            await self._answer_browsers(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        forwarded = None if self._proxies is None else self._proxies.client_of(scope)
        client = scope.get(CONNECTION, scope.get("client")) if forwarded is None else forwarded
        call = Call(scope, receive, self._service, headers, (client,), _request_id(headers, self._own_ids))
        REQUEST_ID.set(call.request_id)
        scope[CALL] = call
        try:
            await self._respond(call, send)
        finally:
            # Two objects that hold each other stay until a garbage collection, for which all requests wait.
            del scope[CALL]
            await self._finish(call)

    async def _respond(self, call: Call, send: Send) -> None:
        """Let a route answer, or answer with an error."""

        async def send_noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                more = [(b"x-request-id", call.request_id.encode())]
                if call.answered_by is not None:
                    more.append((_MODEL_HEADER, call.answered_by.encode()))
                message["headers"] = [*message["headers"], *more]
            await send(message)

        try:
            self._admit(call)
            await self._route(call.scope)(call.scope, call.receive, send_noting_status)
            return
        except AttnCacheError as error:
            # The traceback, and that of the error's cause, hold this frame, which holds the error.
            failure, headers = error.with_traceback(None), headers_of(error)
            failure.__context__ = None
        except HTTPException as error:
            failure = _from_router(error)
            headers = {**(error.headers or {}), **headers_of(failure)}
        except Exception as error:
            log_failure(logger, "a request failed", error)
            failure = InternalError()
            headers = headers_of(failure)
        if call.status == NOT_ANSWERED:
            fields = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
            content = _shape_of(call.scope["path"])(failure)
            await Answer(orjson.dumps(content), fields, failure.status).send(send_noting_status)

    def _route(self, scope: Scope) -> ASGIApp:
        """Return what answers: a route for inference, or the router of all routes."""
        return self._inference.get(scope["path"], self._others) if scope["method"] == "POST" else self._others

    def _admit(self, call: Call) -> None:
        """Find out whose key the request has. Raises Unauthorized, Forbidden and NotFound."""
        scope, keys = call.scope, self._service.keys
        path, listener = scope["path"], scope.get(LISTENER)
        has_admin_port = self._service.settings.admin_port is not None
        is_elsewhere = has_admin_port and listener != "admin" and is_for_operators(path)
        # The router ignores a line break at the end of a path, and the checks of paths do not.
        if "\n" in path:
            raise NotFound(_NO_SUCH_PATH)
        if keys is not None and not is_open(scope["method"], path, listener):
            call.holder = holder = keys.holder(call.headers)
            if not is_elsewhere:
                check_admin(path, holder)
            call.flow, call.namespace = (holder.name, *call.flow), holder.namespace
        if is_elsewhere:
            raise NotFound("this path is served on --admin-port only")

    async def _finish(self, call: Call) -> None:
        """Count a request that was answered or given up."""
        state, ended = self._service, time.perf_counter()
        state.bodies.give(call.body_bytes)
        state.answers.give(call.answer_bytes)
        route = route_of(call.scope["method"], call.scope["path"])
        state.metrics.observe_request(route, call.status, ended - call.started)
        if truncated := sum(result.truncated for result in call.results):
            state.metrics.truncated_sequences.inc(truncated)
        if state.finished is not None:
            state.finished.add(_finished(call, route, ended))
        if call.holder is not None:
            state.metrics.observe_key(call.holder.name, call.tokens)
            await call.holder.use.end(call.tokens, taken=call.taken_tokens)


def is_open(method: str, path: str, listener: ListenerName | None) -> bool:
    """Return whether a request needs no key, also if keys are set."""
    if path in HEALTH_PATHS or (path == _METRICS_PATH and listener == "admin"):
        return True
    # POST / computes.
    return method in ("GET", "HEAD") and (path == _PAGE or path.startswith(_FILES_OF_PAGE))


def check_admin(path: str, holder: KeyHolder) -> None:
    """Raise Forbidden if the path is for admin keys, and the holder has none."""
    if not holder.is_admin and is_among(path, _ADMIN_PATHS):
        raise Forbidden(
            f"this path is about all clients and needs a key with the word {ADMIN} in the file of --api-keys"
        )


def _for_browsers(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return the app with the middleware around it that the settings ask for."""
    if settings.gzip:
        app = _compressed(app)
    if settings.cors_origin is not None:
        app = CORSMiddleware(
            app,
            allow_origins=[origin.strip() for origin in settings.cors_origin.split(",")],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return app


def _compressed(app: ASGIApp) -> ASGIApp:
    """Return the app whose large responses are compressed for clients that accept gzip."""
    compressing = GZipMiddleware(app, minimum_size=_MIN_GZIP_BYTES, compresslevel=_GZIP_LEVEL)

    async def compress(scope: Scope, receive: Receive, send: Send) -> None:
        # GZipMiddleware also compresses for a client that names gzip to refuse it.
        refuses = _NO_GZIP.search(Headers(scope=scope).get("accept-encoding", ""))
        await (app if refuses else compressing)(scope, receive, send)

    return compress


def _from_router(error: HTTPException) -> AttnCacheError:
    """Return the error of an unknown path or an unsupported method."""
    if error.status_code == MethodNotAllowed.status:
        return MethodNotAllowed("this path does not support this method")
    return NotFound(_NO_SUCH_PATH)


def _openai(error: AttnCacheError) -> dict[str, Any]:
    """Return the JSON of an error, as OpenAI's clients read it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": _OPENAI_TYPES.get(error.status, kind),
            "param": error.field,
            "code": _OPENAI_CODES.get(error.code, error.code),
        }
    }


def _openai_and_jina(error: AttnCacheError) -> dict[str, Any]:
    """Return the JSON of an error, as clients of OpenAI, and of Jina's reranker, read it."""
    return {**_openai(error), "detail": str(error)}


def _tei(error: AttnCacheError) -> dict[str, Any]:
    """Return the JSON of an error, as clients of text-embeddings-inference read it."""
    return {"error": str(error), "error_type": _TEI_TYPES.get(error.status, "Validation")}


def _shape_of(path: str) -> Callable[[AttnCacheError], dict[str, Any]]:
    """Return what makes the JSON of errors on a path, whether the path exists or not."""
    if path in _RERANK_PATHS:
        return _openai_and_jina
    if path.startswith(_OPENAI_PREFIXES) or path in ("/v1", "/v2"):
        return _openai
    return _tei if path in _TEI_PATHS else ours


def _request_id(headers: Mapping[bytes, bytes], own_ids: str) -> str:
    """Return the id that the client has given to its request, if it is visible ASCII, or a new one."""
    sent = headers.get(b"x-request-id")
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent.decode()
    return f"{own_ids}{next(_NUMBERS):010x}"


def _finished(call: Call, route: str, ended: float) -> FinishedRequest:
    """Return what the access log and the traces tell of a request."""
    results = call.results
    return FinishedRequest(
        call.request_id,
        call.scope["method"],
        route,
        call.status,
        call.started,
        ended,
        time.time(),
        call.key,
        sum(map(len, results)),
        call.tokens,
        sum(result.all_cached_tokens for result in results),
        sum(result.repeated for result in results),
        [timing for timing in call.timings if timing.computed_at],
        {name.decode(): call.headers[name].decode("latin-1") for name in TRACE_HEADERS & call.headers.keys()},
    )
