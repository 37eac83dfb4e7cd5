"""Make the app: the front with all routes behind it, and what begins and ends with the app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from attncache_core.version import __version__
from service.routes import cache, explain, health, openai, page
from service.routes.classify import classify
from service.routes.embed import embed
from service.routes.inference_route import InferenceRoute
from service.routes.openai import (
    OPENAI,
    RERANK,
    ClassificationRequest,
    Classifications,
    Embeddings,
    EmbeddingsRequest,
    create_classifications,
    create_embeddings,
)
from service.routes.rerank import Rank, Ranked, RerankRequest, rerank
from service.routes.tei import (
    TEI,
    EmbedAllRequest,
    PredictRequest,
    SimilarityRequest,
    TaskRequest,
    TeiErrorBody,
    embed_all,
    predict,
    similarity,
    task,
)
from service.routes.tokens import DecodeRequest, SimpleToken, TokenizeRequest, decode, tokenize
from service.schemas import ClassifyRequest, EmbedRequest, LabelScore
from service.settings import Settings
from service.state import Loaded, ServiceState
from service.upkeep.group import Worker
from service.web.front import Front

_RANKED = list[Rank] | Ranked
_SAYS_RANKED = "The documents, best first: a list for texts, and an object with results for documents."
_TEI_WITH_MODELS = TEI._replace(errors=TEI.errors | {404: {**OPENAI.errors[404], "model": TeiErrorBody}})
# The routes that compute, in the order of the documentation.
INFERENCE_ROUTES = (
    InferenceRoute("/embed", embed, EmbedRequest, list[list[float]], "One embedding per input."),
    InferenceRoute(
        "/classify",
        classify,
        ClassifyRequest,
        list[list[LabelScore]],
        "For each input the labels, best first.",
    ),
    InferenceRoute(
        "/v1/embeddings",
        create_embeddings,
        EmbeddingsRequest,
        Embeddings,
        "One embedding per input, in the order of the inputs.",
        OPENAI,
    ),
    InferenceRoute("/rerank", rerank, RerankRequest, _RANKED, _SAYS_RANKED, _TEI_WITH_MODELS),
    InferenceRoute("/v1/rerank", rerank, RerankRequest, _RANKED, _SAYS_RANKED, RERANK),
    InferenceRoute("/v2/rerank", rerank, RerankRequest, _RANKED, _SAYS_RANKED, RERANK),
    InferenceRoute(
        "/embed_all",
        embed_all,
        EmbedAllRequest,
        list[list[list[float]]],
        "For each input, an embedding of each token.",
        TEI,
    ),
    InferenceRoute(
        "/similarity", similarity, SimilarityRequest, list[float], "One cosine per sentence.", TEI
    ),
    InferenceRoute(
        "/predict",
        predict,
        PredictRequest,
        list[LabelScore] | list[list[LabelScore]],
        "The labels, best first: a list for one text or pair, and a list of lists for a list of them.",
        TEI,
    ),
    InferenceRoute(
        "/tokenize",
        tokenize,
        TokenizeRequest,
        list[list[SimpleToken]],
        "The tokens of each text.",
        TEI,
        reuses=False,
    ),
    InferenceRoute(
        "/decode", decode, DecodeRequest, list[str], "One text per list of token ids.", TEI, reuses=False
    ),
    InferenceRoute(
        "/",
        task,
        TaskRequest,
        list[list[float]] | list[float] | list[LabelScore] | list[list[LabelScore]] | _RANKED,
        "What the route for the task answers.",
        TEI,
    ),
    InferenceRoute(
        "/v1/classify",
        create_classifications,
        ClassificationRequest,
        Classifications,
        "The classes of each input, in the order of the inputs.",
        OPENAI,
    ),
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
        openai.router,
        page.docs_router,
        *([page.router] if settings.page else []),
        *([cache.router, explain.router] if settings.admin else []),
    ):
        app.include_router(router)
    return app
