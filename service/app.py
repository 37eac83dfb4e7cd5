"""The app: routes, error handlers, and one middleware around them.

The middleware counts and times requests, names the model in responses, and answers unexpected exceptions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attncache_core import AttnCacheError, PrefillEngine
from service import __version__
from service.errors import InternalError, error_response, log_failure, on_attncache_error, on_http_exception
from service.observability.metrics import Metrics
from service.routes import cache, classify, embed, health
from service.routes.common import ANSWERED_BY, MODEL_HEADER
from service.settings import Settings
from service.state import ServiceState

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    load_engines: Callable[[], Iterator[PrefillEngine]],
    on_load_failure: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """Return an app that accepts requests at once and loads its engine in the background.

    Until `load_engines` yields an engine, inference requests get status 503. If `load_engines` raises before
    that, requests continue to get 503, and the app calls `on_load_failure` with the exception, on the event
    loop; an exception that is not an AttnCacheError has then been logged. Each further engine, of the same
    model, replaces the engine before.
    """
    state = ServiceState(settings, load_engines, on_load_failure)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        state.start()
        yield
        await state.close()

    app = FastAPI(
        title="AttnCache", version=__version__, lifespan=lifespan, redoc_url=None, redirect_slashes=False
    )
    app.state.service = state
    for routes in (embed, classify, health, *([cache] if settings.admin else [])):
        app.include_router(routes.router)
    app.add_exception_handler(AttnCacheError, on_attncache_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(RequestMiddleware, metrics=state.metrics)
    return app


class RequestMiddleware:
    """ASGI middleware that counts and times requests, names the model, and answers unexpected exceptions.

    Error responses name the model too. An unexpected exception must not reach the server below, because the
    server would log the message, which may quote a user's text.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if ANSWERED_BY in scope:
                    MutableHeaders(scope=message)[MODEL_HEADER] = scope[ANSWERED_BY]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        except Exception as error:
            log_failure(logger, "a request failed", error)
            if status is None:
                await error_response(InternalError())(scope, receive, send_noting_status)
        finally:
            # Without a status, the request was cancelled from outside.
            self._metrics.observe_request(scope["path"], status or 499, time.perf_counter() - started)
