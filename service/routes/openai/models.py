"""GET /v1/models: the one model of the server."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import APIRouter, Response

from service.routes.openai.common import OPENAI_ERRORS, TAG
from service.routes.openai.schemas import Model, Models
from service.routes.served_names import check_model_name, served_name
from service.web.call import Call, CurrentCall

router = APIRouter(prefix="/v1", tags=[TAG])

_STARTED = int(time.time())
_ERRORS: dict[int | str, dict[str, Any]] = {503: OPENAI_ERRORS[503]}


@router.get("/models", response_model=Models, responses=_ERRORS)
async def list_models(call: CurrentCall) -> Response:
    """Return a list with the model that this server serves."""
    return _json({"object": "list", "data": [_described(call)]})


@router.get("/models/{model:path}", response_model=Model, responses={**_ERRORS, 404: OPENAI_ERRORS[404]})
async def retrieve_model(call: CurrentCall, model: str) -> Response:
    """Return the model, by any name that requests may give."""
    check_model_name(model, call.state.settings)
    return _json(_described(call))


def _described(call: Call) -> dict[str, Any]:
    return {
        "id": served_name(call.state.settings),
        "object": "model",
        "created": _STARTED,
        "owned_by": "attncache",
        "max_model_len": call.serving().engine.tokenizer.max_tokens,
    }


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
