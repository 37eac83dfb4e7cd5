"""POST /embed: texts to embeddings."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from service.errors import NoEmbedding
from service.routes.asked import asked, salt_of
from service.routes.common import (
    ANSWER_HEADERS,
    ERRORS,
    answer,
    result_unless_gone,
    serving_of,
    state_of,
)
from service.schemas import EmbedRequest
from service.web.bodies import body_documentation, read_body, reuse_wanted

router = APIRouter()


@router.post(
    "/embed",
    response_model=list[list[float]],
    responses={200: {"headers": ANSWER_HEADERS, "description": "One embedding per input."}, **ERRORS},
    openapi_extra=body_documentation(EmbedRequest),
)
async def embed(request: Request) -> Response:
    """Embed one text or several. The response is a list of embeddings, also for a single text."""
    state = state_of(request)
    serving = serving_of(request)
    if serving.engine.task == "classify":
        raise NoEmbedding("the served model is a classifier and has no embeddings; use /classify")
    if serving.engine.task == "label-logits":
        raise NoEmbedding(
            "the server scores labels and has no embeddings; use /classify, or start it without --task"
        )
    reuse = reuse_wanted(request)
    body = await read_body(request, EmbedRequest, state.settings.max_body_bytes)
    prompt = None if body.prompt_name is None else serving.engine.named_prompt(body.prompt_name)
    async with asked(request, body, state) as source:
        pending = serving.batcher.submit(source, reuse=reuse, prompt=prompt, salt=salt_of(body))
        result = await result_unless_gone(request, pending)
        embeddings = serving.engine.embeddings(result.outputs, normalize=body.normalize)
        return answer(np.ascontiguousarray(embeddings), result, state, source)
