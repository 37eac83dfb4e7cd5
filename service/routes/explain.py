"""POST /explain: why a text reuses something or not, for operators.

The route is served only with --admin. An explanation computes its text several times, layer by layer, and
shows maps that are stored in the database.
"""

from __future__ import annotations

import asyncio
import base64
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import APIRouter, Response
from pydantic import Field

from attncache_core import InputTooLong, InvalidInput, PrefillEngine
from attncache_core.engine.explain import Explanation, LayerMaps, explain
from attncache_core.engine.explain_blend import explain_blend
from attncache_core.heads.comparator import Measure
from service.batching import sources
from service.routes.common import computed, json_response, named
from service.routes.inference_route import ANSWERED_BY, ERRORS, FOR_ADMINS, documented_body
from service.schemas import Body, Name, Text, Texts
from service.web.call import CurrentCall

router = APIRouter(responses={**ANSWERED_BY, **FOR_ADMINS})

# An explanation of a longer text would keep a processor from the requests of clients for too long.
_MAX_TOKENS = 512
# Maps of longer texts would be many megabytes, and too small to see.
_MAX_TOKENS_WITH_MAPS = 64
_MAP_LEVELS = 65535
_ERRORS = {status: documented for status, documented in ERRORS.items() if status != 404}


class ExplainRequest(Body):
    """The body of POST /explain."""

    input: Text | None = Field(None, description=f"One text of at most {_MAX_TOKENS} tokens.")
    segments: Texts | None = Field(
        None, description="Chunks of a prompt, with query, for `?debug=blend`. No input with them."
    )
    query: Text | None = Field(None, description="What stands behind the segments.")
    cache_salt: Name | None = Field(
        None, description="Look up the stored keys and values of requests with this salt. Default: no salt."
    )


@router.post(
    "/explain",
    response_model=dict[str, Any],
    responses=_ERRORS,
    openapi_extra=documented_body(ExplainRequest),
)
async def explain_text(call: CurrentCall) -> Response:
    """Explain what the server reuses for a text: the outcome, the nearest record, and both attention maps.

    With `?debug=blend`: how much the keys and values of each token of the segments deviate. Else the text is
    answered as a request of a client, which says whether its result was kept.
    """
    engine = call.engine
    body = await call.read(ExplainRequest)
    salt = call.salt(body.cache_salt)
    debug = call.query_params.get("debug")
    if debug not in (None, "blend"):
        raise InvalidInput("debug must be blend, or be left out", field="debug")
    if debug:
        if body.segments is None or body.query is None or body.input is not None:
            raise InvalidInput("give segments and query with debug=blend, and no input", field="segments")
        separator = call.state.settings.segment_separator
        async with call.state.explaining:
            await call.require_client()
            found = await asyncio.to_thread(explain_blend, engine, body.segments, body.query, separator, salt)
        return json_response(found)
    if body.input is None or body.segments is not None or body.query is not None:
        raise InvalidInput("give input; segments and query need ?debug=blend", field="input")
    async with call.state.explaining:
        await call.require_client()
        with named("input", lambda _: "input"):
            explained = await asyncio.to_thread(_explained, engine, body.input, salt)
    source = sources.Texts([body.input], call.state.settings.truncate)
    with named("input", lambda _: "input"):
        answered = await computed(call, source, reads=Measure.AGREEMENT, salt=salt, counted=False)
    content = {
        **{name: value for name, value in asdict(explained).items() if name not in ("ids", "layers")},
        "was_kept": answered.repeated > 0,
        "most_tokens_with_maps": _MAX_TOKENS_WITH_MAPS,
        "layers": None if explained.layers is None else [_layer(layer) for layer in explained.layers],
    }
    return json_response(content)


def _explained(engine: PrefillEngine, text: str, salt: bytes) -> Explanation:
    """Explain a text. Raises InputTooLong."""
    ids = engine.tokenize([text])[0]
    if len(ids) > _MAX_TOKENS:
        raise InputTooLong(f"input must have at most {_MAX_TOKENS} tokens to be explained", field="input")
    return explain(engine, ids, salt=salt, maps=len(ids) <= _MAX_TOKENS_WITH_MAPS)


def _layer(layer: LayerMaps) -> dict[str, Any]:
    return {
        "own": _encoded(layer.full),
        "reused_heads": layer.reused_heads,
        "given": None if layer.given is None else _encoded(layer.given),
    }


def _encoded(maps: np.ndarray) -> str:
    """Return maps [heads, L, L] in base64, as 16-bit little-endian integers: 65535 stands for 1."""
    levels = np.rint(np.clip(np.nan_to_num(maps), 0, 1) * _MAP_LEVELS).astype("<u2")
    return base64.b64encode(levels.tobytes()).decode()
