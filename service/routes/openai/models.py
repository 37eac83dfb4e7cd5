"""The one model of the server: the names by which clients may call it, and GET /v1/models."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response

from service.errors import NotFound, UnknownModel
from service.routes.common import json_response
from service.routes.inference_route import ANSWERED_BY
from service.routes.openai.schemas import OPENAI, Model, Models
from service.settings import Settings
from service.web.call import Call, CurrentCall

router = APIRouter(prefix="/v1", tags=[OPENAI.tag])

# Accepts every name, as a name of --served-model-name.
_ANY = "*"
# Says for itself that the client means whatever model the server has.
_DEFAULT = "default"
_STARTED = int(time.time())
_RESPONSES: dict[int | str, dict[str, Any]] = {
    **ANSWERED_BY,
    **{status: OPENAI.errors[status] for status in (400, 401, 409, 503)},
}


def served_name(settings: Settings) -> str:
    """Return the name that the server gives its model."""
    return _names(settings.served_model_name or "", settings.model)[0]


def check_model_name(name: str | None, settings: Settings) -> None:
    """Raise UnknownModel if a request is for another model. None: the request is for any model."""
    accepted = _names(settings.served_model_name or "", settings.model)[1]
    if name is not None and name not in accepted and _ANY not in accepted:
        raise UnknownModel(
            f"model is not the model of this server, which is {served_name(settings)}; send this name, or "
            "start the server with --served-model-name and the names that clients send",
            field="model",
        )


@router.get("/models", response_model=Models, responses=_RESPONSES)
async def list_models(call: CurrentCall) -> Response:
    """Return a list with the model that this server serves."""
    return json_response({"object": "list", "data": [_described(call)]})


@router.get("/models/{model:path}", response_model=Model, responses={**_RESPONSES, 404: OPENAI.errors[404]})
async def retrieve_model(call: CurrentCall, model: str) -> Response:
    """Return the model, by any name that requests may give."""
    if not model:
        raise NotFound("no such path; /v1/models lists the model")
    check_model_name(model, call.state.settings)
    return json_response(_described(call))


def _described(call: Call) -> dict[str, Any]:
    return {
        "id": served_name(call.state.settings),
        "object": "model",
        "created": _STARTED,
        "owned_by": "attncache",
        "max_model_len": call.engine.tokenizer.max_tokens,
    }


@cache
def _names(served: str, model: str) -> tuple[str, list[str]]:
    """Return the name of the model, and the names that requests may give.

    Kept, because a request would wait for the file system. served: of --served-model-name. model: of --model,
    whose own name is that of its folder, or its id on the Hugging Face Hub.
    """
    own = Path(model).resolve().name if Path(model).is_dir() else model
    given = [name for name in map(str.strip, served.split(",")) if name]
    return next(name for name in (*given, own) if name != _ANY), given or [own, model, _DEFAULT]
