"""Make the app: the front with all routes behind it, and what begins and ends with the app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from attncache_core.version import __version__
from service.routes import cache, classify, embed, explain, health, page
from service.routes.openai import classify as openai_classify
from service.routes.openai import embeddings, models
from service.routes.tei import embed_all, predict, rerank, root, similarity, tokens
from service.settings import Settings
from service.state import Loaded, ServiceState
from service.upkeep.group import Worker
from service.web.front import Front

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

    app = Front(
        state,
        INFERENCE_ROUTES,
        title="AttnCache",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from another server; see routes/page.py
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in (
        health.router,
        models.router,
        page.docs_router,
        *([page.router] if settings.page else []),
        *([cache.router, explain.router] if settings.admin else []),
    ):
        app.include_router(router)
    return app
