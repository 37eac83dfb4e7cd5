"""POST /embed: texts to embeddings."""

from __future__ import annotations

import numpy as np

from attncache_core import Measure, PrefillEngine
from service.batching.sources import Source, prompt_of
from service.errors import NoEmbedding
from service.routes.common import answer, computed, json_list
from service.routes.inputs import answered
from service.schemas import EmbedRequest
from service.state import Serving
from service.web.call import Answer, Call, CurrentCall


async def embed(call: CurrentCall) -> Answer:
    """Embed one text or several. The response is a list of embeddings, also for a single text."""
    serving = embedding_server(call)
    reuse = call.reuse_requested()
    body = await call.read(EmbedRequest)
    serving.engine.require_dimensions(body.dimensions)

    async def compute(source: Source) -> Answer:
        result = await computed(
            call,
            serving,
            source,
            reuse=reuse,
            prompt=prompt_of(serving.engine, source, body.prompt_name),
            reads=embedding_measure(serving.engine, body.dimensions),
            salt=call.salt(body.cache_salt),
        )
        embeddings = serving.engine.embeddings(
            result.outputs, normalize=body.normalize, dimensions=body.dimensions
        )
        return answer(await json_list(np.ascontiguousarray(embeddings)), result, call, source)

    return await answered(call, serving, body, compute)


def embedding_measure(engine: PrefillEngine, dimensions: int | None) -> Measure | None:
    """Return what embeddings are read for, see PrefillEngine.may_reuse: budgets are about all dimensions."""
    return Measure.COSINE if dimensions in (None, engine.dimensions) else None


def embedding_server(call: Call) -> Serving:
    """Return the parts that serve this request. Raises NoEmbedding, and as Call.serving."""
    serving = call.serving()
    if serving.engine.checkpoint.task == "classify":
        kind, route = "classifier", "/classify"
        if len(serving.engine.checkpoint.classes) == 1:
            kind, route = "reranker", "/rerank"
        raise NoEmbedding(f"the served model is a {kind} and has no embeddings; use {route}")
    if serving.engine.checkpoint.task == "label-logits":
        raise NoEmbedding(
            "the server scores labels and has no embeddings; use /classify, or start it without --task"
        )
    return serving
