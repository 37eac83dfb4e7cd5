"""POST /embed: texts to embeddings."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from attncache_core import normalize
from service.bodies import body_documentation, read_body, reuse_wanted
from service.errors import NoEmbedding
from service.routes.common import (
    ANSWER_HEADERS,
    ERRORS,
    answer,
    check_count,
    rows_unless_gone,
    serving_of,
    state_of,
)
from service.schemas import EmbedRequest

router = APIRouter()


@router.post(
    "/embed",
    response_model=list[list[float]],
    responses={200: {"headers": ANSWER_HEADERS, "description": "An embedding for each input."}, **ERRORS},
    openapi_extra=body_documentation(EmbedRequest),
)
async def embed(request: Request) -> Response:
    """Embed one text or several; the answer is a list of embeddings, for one text too."""
    state = state_of(request)
    serving = serving_of(request)
    if serving.engine.task == "classify":
        raise NoEmbedding("the served model classifies and has no embeddings; ask /classify")
    if serving.engine.task == "label-logits":
        raise NoEmbedding("labels are served here, no embeddings: ask /classify, or serve without --task")
    reuse = reuse_wanted(request)
    body = await read_body(request, EmbedRequest, state.settings.max_body_bytes)
    check_count(body.inputs, "inputs", state.settings.max_request_inputs)
    truncate = state.settings.truncate if body.truncate is None else body.truncate
    own = serving.engine.default_prompt
    prompt = own if body.prompt_name is None else serving.engine.named_prompt(body.prompt_name)
    # The database's budget was measured with the server's own prompt.
    pending = serving.batcher.submit(
        body.inputs, truncate=truncate, reuse=reuse and prompt == own, prompt=prompt
    )
    rows = await rows_unless_gone(request, pending)
    embeddings = normalize(rows.outputs) if body.normalize else rows.outputs
    return answer(np.ascontiguousarray(embeddings), rows, state.settings)
