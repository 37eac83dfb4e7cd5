"""The app: routes, error handlers, and the front, which every request passes first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from attncache_core.version import __version__
from service.routes import cache, classify, embed, explain, health, page
from service.routes.openai import classify as openai_classify
from service.routes.openai import embeddings, models
from service.routes.tei import embed_all, predict, rerank, root, similarity, tokens
from service.settings import Settings
from service.state import Loaded, ServiceState
from service.upkeep.group import Worker
from service.web.front import Front

# A page of another origin may read these headers of a response.
_EXPOSED = [
    *("Retry-After", "X-Request-Id"),
    *("X-AttnCache-Hits", "X-AttnCache-Cached-Tokens", "X-AttnCache-Repeated", "X-AttnCache-Model"),
]
# Smaller responses fit into a few packets anyway.
_MIN_GZIP_BYTES = 8 * 1024
# Numbers written as text hardly become smaller at higher levels, and the event loop waits meanwhile.
_GZIP_LEVEL = 1


def for_browsers(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return the app with the middleware around it that the settings ask for."""
    if settings.gzip:
        app = GZipMiddleware(app, minimum_size=_MIN_GZIP_BYTES, compresslevel=_GZIP_LEVEL)
    if settings.cors_origin is not None:
        app = CORSMiddleware(
            app,
            allow_origins=[origin.strip() for origin in settings.cors_origin.split(",")],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return app


# Often called ones first, because Starlette compares the path of a request with one route after the other.
INFERENCE_ROUTES = (
    *embed.ROUTES,
    *classify.ROUTES,
    *embeddings.ROUTES,
    *rerank.ROUTES,
    *embed_all.ROUTES,
    *similarity.ROUTES,
    *predict.ROUTES,
    *tokens.ROUTES,
    *root.ROUTES,
    *openai_classify.ROUTES,
)


class App(FastAPI):
    """FastAPI with the front in place of its own middleware."""

    front: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the app from its start to its end."""
        if scope["type"] == "http":
            scope["app"] = self
            await self.front(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    settings: Settings,
    load_engines: Callable[[], Iterator[Loaded]],
    on_load_failure: Callable[[BaseException], None] | None = None,
    worker: Worker | None = None,
) -> FastAPI:
    """Return an app that accepts requests at once and loads its engine in the background.

    Until `load_engines` yields an engine, inference requests get status 503. If `load_engines` raises before
    that, requests continue to get 503, and the app calls `on_load_failure` with the exception, on the event
    loop; an exception that is not an AttnCacheError has then been logged. Each further engine, of the same
    model, replaces the engine before. Lines that `load_engines` yields say what is prepared behind the
    requests. worker: this process, if it is one of several; None: it serves alone. Raises StoreUnavailable if
    the workers cannot share anything.
    """
    state = ServiceState(settings, load_engines, on_load_failure, worker)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        state.start()
        if state.group is not None:
            await state.group.start(partial(cache.do_as_asked, state))
        yield
        if state.group is not None:
            await state.group.close()
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
    app.router.routes.extend(INFERENCE_ROUTES)
    for router in (
        health.router,
        models.router,
        page.docs_router,
        *([page.router] if settings.page else []),
        *([cache.router, explain.router] if settings.admin else []),
    ):
        app.include_router(router)
    # FastAPI keeps in the stack what its other routes open for a request. The router of FastAPI takes longer
    # to find a route than the one of Starlette, so Starlette's looks for the routes for inference first. The
    # path / has routes of both kinds, and a router refuses a method that none of its own routes has.
    first = [route for route in INFERENCE_ROUTES if route.path != "/"]
    behind = Router(first, redirect_slashes=False, default=AsyncExitStackMiddleware(app.router))
    front = Front(behind, state)
    app.front = for_browsers(front, settings)
    return app
