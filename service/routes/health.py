"""Routes for operators: liveness, readiness, a description of the server, and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from service import __version__
from service.routes.common import ERRORS, state_of

router = APIRouter()

_SHOWN_SETTINGS = {
    "reuse",
    "maps",
    "kv",
    "min_gain",
    "verify_rate",
    "truncate",
    "max_batch_tokens",
    "max_batch_sequences",
    "max_queue_sequences",
    "max_request_inputs",
    "max_request_tokens",
    "max_body_bytes",
}
_NOT_READY: dict[int | str, dict[str, Any]] = {503: ERRORS[503]}


class Health(BaseModel):
    """The process is alive."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """The model and its database are loaded."""

    status: Literal["ready"] = "ready"


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Health:
    """Return status 200 as soon as the process listens, before anything is loaded."""
    return Health()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=_NOT_READY)
async def ready(request: Request) -> Ready:
    """Return status 200 once requests are answered, and 503 while model and database are loading."""
    state_of(request).serving()
    return Ready()


@router.get("/info", response_model=dict[str, Any], responses=_NOT_READY)
async def info(request: Request) -> Response:
    """Describe the model, its classes and limits, the database, and the settings that concern clients."""
    state = state_of(request)
    content = {
        "version": __version__,
        **asdict(state.serving().engine.info()),
        "settings": state.settings.model_dump(include=_SHOWN_SETTINGS),
    }
    dumped = orjson.dumps(content, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(dumped, media_type="application/json")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    state = state_of(request)
    state.metrics.observe_sessions(state.sessions.count)
    # In a thread, because writing hundreds of lines would block the event loop.
    content = await asyncio.to_thread(state.metrics.render)
    return Response(content, media_type=CONTENT_TYPE_LATEST)
