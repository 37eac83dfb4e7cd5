"""The app: routes, error handlers, and the front, which every request passes first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from attncache_core import AttnCacheError
from attncache_core.version import __version__
from service.routes import cache, explain, health, page
from service.routes.endpoints import ENDPOINTS
from service.routes.openai import models
from service.settings import Settings
from service.state import Loaded, ServiceState
from service.web.browsers import for_browsers
from service.web.call import Team
from service.web.endpoint import document
from service.web.error_shapes import on_attncache_error, on_failure, on_http_exception
from service.web.front import Front
from service.web.listeners import OperatorsOnly


class App(FastAPI):
    """FastAPI behind the front. Requests reach the front directly, before any middleware of FastAPI."""

    front: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the app from its start to its end."""
        if scope["type"] == "http":
            await self.front(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    settings: Settings,
    load_engines: Callable[[], Iterator[Loaded]],
    on_load_failure: Callable[[BaseException], None] | None = None,
    team: Team | None = None,
) -> FastAPI:
    """Return an app that accepts requests at once and loads its engine in the background.

    Until `load_engines` yields an engine, inference requests get status 503. If `load_engines` raises before
    that, requests continue to get 503, and the app calls `on_load_failure` with the exception, on the event
    loop; an exception that is not an AttnCacheError has then been logged. Each further engine, of the same
    model, replaces the engine before. Lines that `load_engines` yields say what is prepared behind the
    requests. team: the workers that the app belongs to; None: it serves alone.
    """
    state = ServiceState(
        settings, load_engines, on_load_failure, *([team.quota_use] if team is not None else [])
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        state.start()
        if team is not None:
            await team.open(state, front.answer)
        yield
        if team is not None:
            team.close()
        await state.close()

    app = App(
        title="AttnCache",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from another server; see routes/page.py
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = state
    document(app, ENDPOINTS)
    for router in (
        health.router,
        models.router,
        page.docs_router,
        *([page.router] if settings.page else []),
        *([cache.router, explain.router] if settings.admin else []),
    ):
        app.include_router(router)
    app.add_exception_handler(AttnCacheError, on_attncache_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_failure)
    if settings.admin_port is not None:
        app.add_middleware(OperatorsOnly)
    behind = partial(FastAPI.__call__, app)
    endpoints = {endpoint.path: endpoint for endpoint in ENDPOINTS}
    front = Front(behind, state=state, endpoints=endpoints, team=team)
    app.front = for_browsers(front, settings)
    return app
