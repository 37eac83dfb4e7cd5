"""POST /embed: texts to embeddings."""

from __future__ import annotations

import numpy as np

from attncache_core import Measure, PrefillEngine
from service.batching.sources import Source, prompt_of
from service.errors import NoEmbedding
from service.routes.common import answer, computed, json_list
from service.routes.inputs import answered
from service.schemas import EmbedRequest
from service.web.call import Answer, Call, CurrentCall


async def embed(call: CurrentCall) -> Answer:
    """Embed one text or several. The response is a list of embeddings, also for a single text."""
    engine = embedding_engine(call)
    body = await call.read(EmbedRequest)
    engine.require_dimensions(body.dimensions)

    async def compute(source: Source) -> Answer:
        result = await computed(
            call,
            source,
            prompt=prompt_of(engine, source, body.prompt_name),
            reads=embedding_measure(engine, body.dimensions),
            salt=call.salt(body.cache_salt),
        )
        embeddings = engine.embeddings(result.outputs, normalize=body.normalize, dimensions=body.dimensions)
        return answer(await json_list(np.ascontiguousarray(embeddings), call), result, call, source)

    return await answered(call, body, compute)


def embedding_measure(engine: PrefillEngine, dimensions: int | None) -> Measure | None:
    """Return what embeddings are read for, see PrefillEngine.may_reuse: budgets are about all dimensions."""
    return Measure.COSINE if dimensions in (None, engine.dimensions) else None


def embedding_engine(call: Call) -> PrefillEngine:
    """Return the engine that serves this request. Raises NoEmbedding, and as Call.serving."""
    checkpoint = call.engine.checkpoint
    if checkpoint.task == "classify":
        kind, route = "classifier", "/classify"
        if len(checkpoint.classes) == 1:
            kind, route = "reranker", "/rerank"
        raise NoEmbedding(f"the served model is a {kind} and has no embeddings; use {route}")
    if checkpoint.task == "label-logits":
        raise NoEmbedding(
            "the server scores labels and has no embeddings; use /classify, or start it without --task"
        )
    return call.engine
