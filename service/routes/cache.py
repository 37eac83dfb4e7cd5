"""The routes under /cache, for operators: show, compute, pin and drop stored keys and values.

They are served only with --admin, because they show and change what is stored for all clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field
from starlette.types import Message

from attncache_core import InvalidInput
from attncache_core.reuse.blend.loading import Device, cheapest_device, cost_per_hour
from attncache_core.reuse.kv.capacity import CapacityPlan
from attncache_core.reuse.kv.info import KeyValueInfo, key_value_info
from service.access.keys import namespace_of
from service.batching.chosen import Chosen, store_of
from service.errors import StoreUnavailable, WorkerUnavailable, log_failure
from service.routes.common import check_count, computed, json_response, named
from service.routes.inference_route import (
    ANSWERED_BY,
    ERRORS,
    FOR_ADMINS,
    documented_body,
    documented_parameter,
)
from service.schemas import Body, Inputs, Name, Text, Texts
from service.state import ServiceState
from service.web.call import Call, CurrentCall, number

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/cache", responses={**ANSWERED_BY, **FOR_ADMINS})

Done = TypeVar("Done", bound=BaseModel)

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
_DEVICES = (
    "Places where keys and values could be saved, each as name,bytes per second,price in $ per GB and hour; "
    "separated by semicolons. The answer says which one is the cheapest from which loading costs blended "
    "chunks no time (CacheBlend, section 5)."
)
_PLANNED = {
    "memory_price": "Price of memory in $ per GB (10⁹ bytes) and hour.",
    "disk_price": "Price of the disk in $ per GB (10⁹ bytes) and hour.",
    "prefill_tokens_per_second": "Tokens that the model computes per second, to choose among devices. "
    "Default: as measured at the start, with --kv-dir.",
    "distinct_sessions": "Sessions that are used within the time to live of a session (DSpUT). Default: the "
    "number of sessions now.",
}


class _About(Body):
    """What a request is about: texts, what all texts in a template begin with, or segments of prompts."""

    texts: Inputs | None = Field(None, description="One text or a list of texts, in the server's template.")
    template: Text | None = Field(
        None,
        description="Instead of texts: a template that holds {} once. The request is about the tokens that "
        "all texts in this template begin with.",
    )
    segments: Texts | None = Field(
        None, description="Instead of texts: segments, each as prompts of segments and a query use it."
    )
    cache_salt: Name | None = Field(
        None, description="Requests of one salt share stored keys and values. Default: no salt."
    )
    key: Name | None = Field(
        None,
        description="Name of the API key whose requests share the stored keys and values. Default: the key "
        "of this request.",
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
async def stats(call: CurrentCall) -> Response:
    """Return what the store holds, what happened to it since the start, and the number of sessions."""
    store, sessions = store_of(call.engine), call.state.sessions
    info = await asyncio.to_thread(key_value_info, store)
    count = await sessions.count()
    return json_response({**asdict(info), "sessions": count, "distinct_sessions": sessions.distinct})


@router.post(
    "/warm",
    response_model=Warmed,
    responses=_ERRORS,
    openapi_extra=documented_body(WarmRequest),
)
async def warm(call: CurrentCall) -> Response:
    """Compute and store the keys and values of texts, or of what all texts in a template begin with."""
    store = store_of(call.engine)
    body = await call.read(WarmRequest)
    chosen = await _chosen(call, body)
    with named("texts"):
        result = await computed(
            call, chosen, prompt=chosen.prompt, counted=False, salt=chosen.salt, repeats=False
        )

    def stored_tokens() -> int:
        prefix_key = chosen.prefix_key(call.engine)
        for key in prefix_key if body.pin else ():
            store.pin(key)
        return sum(sum(store.lookup(key)) for key in prefix_key)

    stored = await asyncio.to_thread(stored_tokens)
    warmed = Warmed(tokens=chosen.tokens, cached_tokens=result.all_cached_tokens, stored_tokens=stored)
    others = await _of_other_workers(call, "warm", Warmed, body)
    return json_response(_least([warmed, *others]))


@router.post(
    "/pin",
    response_model=Pinned,
    responses=_ERRORS,
    openapi_extra=documented_body(PinRequest),
)
async def pin(call: CurrentCall) -> Response:
    """Keep stored keys and values in memory, or let them be evicted again. Nothing is computed."""
    store = store_of(call.engine)
    body = await call.read(PinRequest)
    chosen = await _chosen(call, body)

    def pin_all() -> int:
        tokens = 0
        for key in chosen.prefix_key(call.engine):
            if body.pinned:
                store.fetch(key)
            tokens += store.pin(key, body.pinned)
        return tokens

    pinned = Pinned(tokens=await asyncio.to_thread(pin_all))
    return json_response(_least([pinned, *await _of_other_workers(call, "pin", Pinned, body)]))


@router.post(
    "/lookup",
    response_model=list[Found],
    responses=_ERRORS,
    openapi_extra=documented_body(LookupRequest),
)
async def lookup(call: CurrentCall) -> Response:
    """Return how many tokens of each text are stored, and where. Nothing is computed or moved."""
    store = store_of(call.engine)
    body = await call.read(LookupRequest)
    chosen = await _chosen(call, body)

    def look_up() -> list[dict[str, Any]]:
        found = [store.lookup(key) for key in chosen.prefix_key(call.engine)]
        return [
            Found(tokens=len(ids), cached_tokens=sum(tokens), tiers=tokens._asdict()).model_dump()
            for ids, tokens in zip(chosen.sequences, found, strict=True)
        ]

    return json_response(await asyncio.to_thread(look_up))


@router.delete("", response_model=Dropped, responses=_ERRORS_WITHOUT_BODY)
async def drop(call: CurrentCall) -> Response:
    """Drop all stored keys and values, of all clients, pinned ones too."""
    store = store_of(call.engine)
    try:
        blocks = await asyncio.to_thread(store.clear)
    except OSError as error:
        log_failure(logger, "saved keys and values were not all removed", error)
        blocks = None
    others = await _of_other_workers(call, "drop", Dropped)
    if blocks is None:
        raise StoreUnavailable(
            "keys and values were dropped from memory, but not all from --kv-dir and the shared store; see "
            "the log, and send the request again",
        )
    return json_response({"blocks": blocks + sum(other.blocks for other in others)})


@router.get(
    "/capacity",
    response_model=dict[str, Any],
    responses=_ERRORS_WITHOUT_BODY,
    openapi_extra={
        "parameters": [
            documented_parameter(name, text, {"type": "number", "minimum": 0}, "query")
            for name, text in _PLANNED.items()
        ]
        + [
            documented_parameter(
                "devices",
                _DEVICES,
                {"type": "string", "examples": ["nvme,4e9,0.0001;disk,2e8,0.00003"]},
                "query",
            )
        ]
    },
)
async def capacity(call: CurrentCall) -> Response:
    """Return how many sessions fit into the store, and what the store costs.

    The numbers are those of CachedAttention, section 4.3.6.
    """
    info = key_value_info(store_of(call.engine))
    parameters = dict(call.query_params)
    devices = parameters.pop("devices", None)
    planned = _numbers(parameters)
    sessions = planned.get("distinct_sessions", call.state.sessions.distinct)
    plan = CapacityPlan(
        # With the pooled state of each block.
        bytes_per_token=-(-info.block_bytes // info.block_tokens),
        context_window=call.engine.tokenizer.max_tokens,
        memory_bytes=info.memory.most_bytes,
        disk_bytes=info.disk.most_bytes if info.disk else 0,
        distinct_sessions=int(sessions),
        memory_price=planned.get("memory_price"),
        disk_price=planned.get("disk_price") if info.disk else 0.0,
    )
    return json_response(
        {
            **plan.figures(),
            **({} if devices is None else {"device": _device(info, devices, planned)}),
        }
    )


async def _chosen(call: Call, body: _About) -> Chosen:
    """Return the token sequences that a request is about. Raises InvalidInput."""
    engine, settings, salt = call.engine, call.state.settings, _salt(call, body)
    if [body.texts, body.template, body.segments].count(None) != 2:
        raise InvalidInput("give one of texts, template and segments", field="texts")
    if body.segments is not None:
        check_count(call, body.segments, "segments")
        return await asyncio.to_thread(Chosen.segments, engine, body.segments, salt)
    # In a thread, because texts and templates may be long.
    if body.texts is None:
        return await asyncio.to_thread(Chosen.template, engine, body.template or "", salt)
    check_count(call, body.texts, "texts")
    if engine.tokenizer.default_prompt.template.is_for_pairs:
        raise InvalidInput(
            "texts are not taken by this server, whose template holds a query and a document; give template, "
            "with all that stands before them",
            field="texts",
        )
    with named("texts"):
        return await asyncio.to_thread(
            Chosen.texts,
            engine,
            body.texts,
            salt,
            truncate=settings.truncate,
            max_total_tokens=settings.max_request_tokens,
        )


async def do_as_asked(state: ServiceState, command: dict[str, Any]) -> bytes:
    """Do what another worker asks of all workers, and return the response. See _of_other_workers."""

    async def receive() -> Message:
        return await asyncio.Future()

    call = Call({}, receive, state, {}, ("worker",), command["request_id"], is_relayed=True)
    call.namespace, call.content_read = command["namespace"].encode(), command["body"].encode()
    routes = {"warm": warm, "pin": pin, "drop": drop}
    try:
        return bytes((await routes[command["route"]](call)).body)
    finally:
        state.bodies.give(call.body_bytes)


async def _of_other_workers(
    call: Call, route: str, kind: type[Done], body: BaseModel | None = None
) -> list[Done]:
    """Let the other workers do the same, and return what they did.

    Raises WorkerUnavailable if one of them did not, StoreUnavailable, ClientGone and DeadlineExceeded.
    """
    group = call.state.group
    if group is None or call.is_relayed:
        return []
    command = {
        "route": route,
        "body": "" if body is None else body.model_dump_json(exclude_unset=True),
        "namespace": call.namespace.decode(),
        "request_id": call.request_id,
    }
    answers = await group.ask(command, call.pause)
    if not all(answers):
        raise WorkerUnavailable(
            "not all worker processes of the server have done this; send the request again",
        )
    return [kind.model_validate_json(answer) for answer in answers]


def _least(done: Sequence[BaseModel]) -> dict[str, int]:
    """Return of each number the least: what holds for every worker."""
    numbers = [usage.model_dump() for usage in done]
    return {name: min(number[name] for number in numbers) for name in numbers[0]}


def _salt(call: Call, body: _About) -> bytes:
    """Return what separates the requests that a request is about from others. Raises InvalidInput."""
    if body.key is None:
        return call.salt(body.cache_salt)
    if call.state.keys is None or body.key not in call.state.keys.names:
        raise InvalidInput("key must be the name of an API key of this server", field="key")
    return namespace_of(body.key) + (body.cache_salt or "").encode()


def _numbers(parameters: Mapping[str, str]) -> dict[str, float]:
    """Return the values of query parameters. Raises InvalidInput."""
    found: dict[str, float] = {}
    for name, value in parameters.items():
        if name not in _PLANNED:
            # The client chose the name, so the message does not repeat it.
            raise InvalidInput(
                f"unknown query parameter; the known ones are {', '.join((*_PLANNED, 'devices'))}"
            )
        found[name] = number(value)
        if not 0 <= found[name] <= _LARGEST:
            raise InvalidInput(f"{name} must be a number from 0 to {_LARGEST:g}", field=name)
    return found


def _device(info: KeyValueInfo, devices: str, planned: Mapping[str, float]) -> dict[str, Any]:
    """Return the device to save on, what it costs, and whether loading from it is hidden. Raises
    InvalidInput.
    """
    speed = planned.get("prefill_tokens_per_second") or (info.disk and info.disk.prefill_tokens_per_second)
    if not speed:
        raise InvalidInput(
            "the speed of computing was not measured, because there is no --kv-dir; give "
            "prefill_tokens_per_second",
            field="prefill_tokens_per_second",
        )
    found = []
    for device in devices.split(";"):
        name, _, numbers = device.partition(",")
        try:
            throughput, price = map(number, numbers.split(","))
            if not (0 < throughput <= _LARGEST and 0 <= price <= _LARGEST):
                raise ValueError
        except ValueError as error:
            raise InvalidInput(
                "devices must be name,bytes per second,price for each device, separated by semicolons",
                field="devices",
            ) from error
        found.append(Device(name, throughput, price))
    token_bytes = info.block_bytes // info.block_tokens
    best, is_hidden = cheapest_device(found, token_bytes, speed)
    tokens = (info.disk or info.memory).most_bytes // token_bytes
    cost = cost_per_hour(best, token_bytes, tokens)
    return {"name": best.path, "hides_loading": is_hidden, "cost": cost}
