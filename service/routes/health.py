"""Routes for operators: liveness, readiness, a description of the server, and metrics.

/info also has what clients of text-embeddings-inference read.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from attncache_core import PrefillEngine
from attncache_core.engine.info import EngineInfo
from attncache_core.version import __version__
from service.errors import NotReady, ShuttingDown, StoreUnavailable, Stuck
from service.routes.inference_route import ERRORS, FOR_ADMINS
from service.routes.openai import served_name
from service.settings import Settings
from service.upkeep.watchdog import Condition
from service.web.call import CurrentCall


def tei_info(engine: PrefillEngine, info: EngineInfo, settings: Settings) -> dict[str, Any]:
    """Return the fields of TEI's /info. info: of the engine."""
    return {
        "model_id": served_name(settings),
        "model_sha": info.commit,
        "model_dtype": info.dtype,
        "model_type": _model_type(engine, info),
        "max_concurrent_requests": settings.max_queue_sequences,
        "max_input_length": info.max_tokens,
        "max_batch_tokens": settings.max_batch_tokens,
        "max_batch_requests": settings.max_batch_sequences,
        "max_client_batch_size": settings.max_request_inputs,
        "auto_truncate": settings.truncate,
        "tokenization_workers": engine.parallel_runs,
    }


def _model_type(engine: PrefillEngine, info: EngineInfo) -> dict[str, Any]:
    if info.task == "embed":
        return {"embedding": {"pooling": "+".join(info.pooling or ())}}
    labels = info.labels
    kind = "reranker" if engine.decisions.scores_pairs else "classifier"
    return {
        kind: {
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
        }
    }


router = APIRouter()

_RETRY_SECONDS = 2

_SHOWN_SETTINGS = {
    "workers",
    "admin",
    "reuse",
    "maps",
    "kv",
    "min_gain",
    "verify_rate",
    "truncate",
    "sample",
    "renew_hours",
    "max_batch_tokens",
    "max_queue_sequences",
    "max_queue_seconds",
    "max_request_inputs",
    "max_request_tokens",
    "max_body_bytes",
    "result_memory_bytes",
}
_NOT_READY: dict[int | str, dict[str, Any]] = {503: ERRORS[503]}


class Health(BaseModel):
    """The process is alive."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The model, and the database of --database, are loaded."""

    status: Literal["ready"] = "ready"


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=_NOT_READY)
async def health(call: CurrentCall) -> Health:
    """Return status 200 as soon as the process listens, and 503 if it should be started again."""
    watchdog = call.state.watchdog
    if watchdog.condition is Condition.STUCK:
        raise _stuck(2 * watchdog.stuck_seconds)
    return Health()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=_NOT_READY)
async def ready(call: CurrentCall) -> Ready:
    """Return status 200 while requests should be sent here.

    Status 503 while model and database are loading, during the shutdown, and while a batch is stuck.
    """
    state = call.state
    state.serving()
    if state.group is not None and not state.group.worker.all_have_been_ready():
        raise NotReady("the other workers are being started", retry_after_seconds=_RETRY_SECONDS)
    if state.draining:
        raise ShuttingDown("the server finishes its requests and ends")
    if state.watchdog.condition is not Condition.FINE:
        raise _stuck(state.watchdog.stuck_seconds)
    return Ready()


@router.get("/info", response_model=dict[str, Any], responses={**_NOT_READY, 401: ERRORS[401]})
async def info(call: CurrentCall) -> Response:
    """Describe the model, its classes and limits, the database, and the settings that concern clients."""
    state = call.state
    engine = state.serving().engine
    described = engine.info()
    content = {
        "version": __version__,
        **asdict(described),
        **tei_info(engine, described, state.settings),
        "preparing": state.preparing,
        "sample": asdict(state.sampling.state) if state.sampling is not None else None,
        "shared": _shared(state.settings),
        "settings": state.settings.model_dump(include=_SHOWN_SETTINGS),
    }
    dumped = orjson.dumps(content, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(dumped, media_type="application/json")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **FOR_ADMINS},
)
async def metrics(call: CurrentCall) -> Response:
    """Return all metrics in Prometheus' text format, or the metrics that `name[]` names, which may repeat."""
    state, names = call.state, call.query_params.getlist("name[]")
    # The metrics of workers do not depend on their store.
    with suppress(StoreUnavailable):
        state.metrics.sessions.set(await state.sessions.count())
    # In a thread, because writing hundreds of lines would block the event loop.
    content = await asyncio.to_thread(state.metrics.render, names)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


def _shared(settings: Settings) -> dict[str, Any] | None:
    """Return which store machines share, without user and password, and what it is used for."""
    address = settings.shared_address
    return None if address is None else {"store": str(address), "uses": settings.shared_uses.split(",")}


def _stuck(seconds: float) -> Stuck:
    return Stuck(f"a batch or the event loop takes longer than {seconds:g} seconds", retry_after_seconds=10)
