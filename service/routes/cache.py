"""The routes under /cache, for operators: show, compute, pin and drop stored keys and values.

They are served only with --admin, because they show and change what is stored for all clients.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from attncache_core import InputTooLong, InvalidInput, NotFinite
from attncache_core.reuse.kv.capacity import CapacityPlan
from attncache_core.reuse.kv.info import key_value_info
from service.routes.common import ERRORS, check_count, result_unless_gone, serving_of, state_of
from service.schemas import Inputs, Name, Text
from service.state import Serving
from service.upkeep.warming import Chosen, store_of
from service.web.bodies import body_documentation, read_body

router = APIRouter(prefix="/cache")

_NO_STORE = "The server stores no keys and values, or the request requires another model."
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**documented, "description": _NO_STORE} if status == 409 else documented
    for status, documented in ERRORS.items()
    if status != 404
}
_ERRORS_WITHOUT_BODY: dict[int | str, dict[str, Any]] = {
    status: _ERRORS[status] for status in (400, 409, 500, 503)
}
_LARGEST = 10**15  # of a query parameter
_PLANNED = {
    "memory_price": "Price of memory in $ per GB (10⁹ bytes) and hour.",
    "disk_price": "Price of the disk in $ per GB (10⁹ bytes) and hour.",
    "distinct_sessions": "Sessions that are used within the time to live of a session (DSpUT). Default: the "
    "number of sessions now.",
}


class _About(BaseModel):
    """What a request is about: texts in the server's template, or what all texts in a template begin with."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    texts: Inputs | None = Field(None, description="One text or a list of texts, in the server's template.")
    template: Text | None = Field(
        None,
        description="Instead of texts: a template that holds {} once. The request is about the tokens that "
        "all texts in this template begin with.",
    )
    cache_salt: Name | None = Field(
        None, description="Requests of one salt share stored keys and values. Default: no salt."
    )


class WarmRequest(_About):
    """The body of POST /cache/warm."""

    pin: bool = Field(False, description="Keep the keys and values in memory until they are unpinned.")


class PinRequest(_About):
    """The body of POST /cache/pin."""

    pinned: bool = Field(True, description="false lets the keys and values be evicted again.")


class LookupRequest(_About):
    """The body of POST /cache/lookup."""


class Warmed(BaseModel):
    """The response of POST /cache/warm, in tokens of all texts together."""

    tokens: int
    cached_tokens: int  # that were stored before
    stored_tokens: int  # that are stored now


class Pinned(BaseModel):
    """The response of POST /cache/pin."""

    tokens: int  # that were found in memory, and are pinned or unpinned now


class Found(BaseModel):
    """One text in the response of POST /cache/lookup."""

    tokens: int
    cached_tokens: int
    tiers: dict[str, int]  # tokens by the tier that holds them


class Dropped(BaseModel):
    """The response of DELETE /cache."""

    blocks: int  # that were in memory


@router.get("/stats", response_model=dict[str, Any], responses=_ERRORS_WITHOUT_BODY)
async def stats(request: Request) -> Response:
    """Return what the store holds, what happened to it since the start, and the number of sessions."""
    store, sessions = store_of(serving_of(request).engine), state_of(request).sessions
    info = await asyncio.to_thread(key_value_info, store)
    return _json({**asdict(info), "sessions": sessions.count, "distinct_sessions": sessions.distinct})


@router.post(
    "/warm",
    response_model=Warmed,
    responses=_ERRORS,
    openapi_extra={"requestBody": body_documentation(WarmRequest)["requestBody"]},
)
async def warm(request: Request) -> Response:
    """Compute and store the keys and values of texts, or of what all texts in a template begin with."""
    serving = serving_of(request)
    store = store_of(serving.engine)
    body = await read_body(request, WarmRequest, state_of(request).settings.max_body_bytes)
    chosen = await _chosen(request, serving, body)
    pending = serving.batcher.submit(
        chosen, prompt=chosen.prompt, reuse=True, counted=False, salt=chosen.salt
    )
    try:
        result = await result_unless_gone(request, pending)
    except NotFinite as error:
        raise NotFinite.of(error.index, "texts") from error

    def stored_tokens() -> int:
        wanted = chosen.wanted(serving.engine)
        for own in wanted if body.pin else ():
            store.pin(own)
        return sum(sum(store.lookup(own)) for own in wanted)

    stored = await asyncio.to_thread(stored_tokens)
    warmed = Warmed(tokens=chosen.tokens, cached_tokens=result.cached_tokens, stored_tokens=stored)
    return _json(warmed.model_dump())


@router.post(
    "/pin",
    response_model=Pinned,
    responses=_ERRORS,
    openapi_extra={"requestBody": body_documentation(PinRequest)["requestBody"]},
)
async def pin(request: Request) -> Response:
    """Keep stored keys and values in memory, or let them be evicted again. Nothing is computed."""
    serving = serving_of(request)
    store = store_of(serving.engine)
    body = await read_body(request, PinRequest, state_of(request).settings.max_body_bytes)
    chosen = await _chosen(request, serving, body)

    def pin_all() -> int:
        tokens = 0
        for own in chosen.wanted(serving.engine):
            if body.pinned:
                store.fetch(own)
            tokens += store.pin(own, body.pinned)
        return tokens

    return _json(Pinned(tokens=await asyncio.to_thread(pin_all)).model_dump())


@router.post(
    "/lookup",
    response_model=list[Found],
    responses=_ERRORS,
    openapi_extra={"requestBody": body_documentation(LookupRequest)["requestBody"]},
)
async def lookup(request: Request) -> Response:
    """Return how many tokens of each text are stored, and where. Nothing is computed or moved."""
    serving = serving_of(request)
    store = store_of(serving.engine)
    body = await read_body(request, LookupRequest, state_of(request).settings.max_body_bytes)
    chosen = await _chosen(request, serving, body)

    def look_up() -> list[dict[str, Any]]:
        found = [store.lookup(own) for own in chosen.wanted(serving.engine)]
        return [
            Found(tokens=len(ids), cached_tokens=sum(tokens), tiers=tokens._asdict()).model_dump()
            for ids, tokens in zip(chosen.sequences, found, strict=True)
        ]

    return _json(await asyncio.to_thread(look_up))


@router.delete("", response_model=Dropped, responses=_ERRORS_WITHOUT_BODY)
async def drop(request: Request) -> Response:
    """Drop all stored keys and values, of all clients, pinned ones too."""
    store = store_of(serving_of(request).engine)
    return _json(Dropped(blocks=await asyncio.to_thread(store.clear)).model_dump())


@router.get(
    "/capacity",
    response_model=dict[str, Any],
    responses=_ERRORS_WITHOUT_BODY,
    openapi_extra={
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": text,
                "schema": {"type": "number", "minimum": 0},
            }
            for name, text in _PLANNED.items()
        ]
    },
)
async def capacity(request: Request) -> Response:
    """Return how many sessions fit into the store, and what the store costs.

    The numbers are those of CachedAttention, section 4.3.6.
    """
    serving = serving_of(request)
    info = key_value_info(store_of(serving.engine))
    planned = _numbers(request.query_params)
    sessions = planned.get("distinct_sessions", state_of(request).sessions.distinct)
    plan = CapacityPlan(
        # With the pooled state of each block.
        bytes_per_token=-(-info.block_bytes // info.block_tokens),
        context_window=serving.engine.max_tokens,
        memory_bytes=info.memory.most_bytes,
        disk_bytes=info.disk.most_bytes if info.disk else 0,
        distinct_sessions=int(sessions),
        memory_price=planned.get("memory_price"),
        disk_price=planned.get("disk_price") if info.disk else 0.0,
    )
    return _json(
        {
            **asdict(plan),
            "session_bytes": plan.session_bytes,
            "memory_sessions": plan.memory_sessions,
            "disk_sessions": plan.disk_sessions,
            "sessions": plan.sessions,
            "full_bytes": plan.full_bytes,
            "capacity_ratio": plan.capacity_ratio,
            "memory_cost": plan.memory_cost,
            "disk_cost": plan.disk_cost,
            "cost": plan.cost,
        }
    )


async def _chosen(request: Request, serving: Serving, body: _About) -> Chosen:
    """Return the token sequences that a request is about. Raises InvalidInput."""
    settings, salt = state_of(request).settings, (body.cache_salt or "").encode()
    if (body.texts is None) == (body.template is None):
        raise InvalidInput("give either texts or a template", field="texts")
    # In a thread, because texts and templates may be long.
    if body.texts is None:
        return await asyncio.to_thread(Chosen.template, serving.engine, body.template or "", salt)
    check_count(body.texts, "texts", settings.max_request_inputs)
    try:
        return await asyncio.to_thread(
            Chosen.texts,
            serving.engine,
            body.texts,
            salt,
            truncate=settings.truncate,
            most_tokens=settings.max_request_tokens,
        )
    except InputTooLong as error:
        # The tokenizer knows the texts as inputs.
        field = (error.field or "inputs").replace("inputs", "texts")
        raise InputTooLong(str(error).replace("inputs", "texts"), field=field) from error


def _numbers(parameters: Mapping[str, str]) -> dict[str, float]:
    """Return the values of query parameters. Raises InvalidInput."""
    found: dict[str, float] = {}
    for name, value in parameters.items():
        if name not in _PLANNED:
            # The client chose the name, so the message does not repeat it.
            raise InvalidInput(f"unknown query parameter; the known ones are {', '.join(_PLANNED)}")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not 0 <= found[name] <= _LARGEST:
            raise InvalidInput(f"{name} must be a number from 0 to {_LARGEST:g}", field=name)
    return found


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
