"""POST /v1/embeddings: texts or token ids to embeddings, as OpenAI's clients send and read them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np

from attncache_core import InvalidInput, PrefillEngine
from service.batching.sources import Source, TokenSequences, bare_prompt, prompt_of, source_of
from service.routes.common import answer, check_count, computed, json_list, named
from service.routes.embed import embedding_engine, embedding_measure
from service.routes.openai.models import check_model_name, served_name
from service.routes.openai.schemas import EmbeddingsRequest, usage_of
from service.web.call import Answer, CurrentCall


async def create_embeddings(call: CurrentCall) -> Answer:
    """Embed one text or several. Embeddings have unit length."""
    engine, settings = embedding_engine(call), call.state.settings
    body = await call.read(EmbeddingsRequest)
    check_model_name(body.model, settings)
    check_count(call, body.input, "input")
    engine.require_dimensions(body.dimensions)
    source = source_of(body.input, settings.truncate, "right")
    if settings.check_token_ids:
        _check_ends(engine, source)
    with named("input"):
        result = await computed(
            call,
            source,
            prompt=prompt_of(engine, source, None),
            reads=embedding_measure(engine, body.dimensions),
            salt=call.salt(body.cache_salt),
        )
    embeddings = engine.embeddings(result.outputs, normalize=True, dimensions=body.dimensions)
    content = {
        "object": "list",
        "data": await json_list(_encoded(embeddings, as_base64=body.encoding_format == "base64")),
        "model": served_name(settings),
        "usage": usage_of(result, settings),
    }
    return answer(content, result, call)


def _encoded(embeddings: np.ndarray, *, as_base64: bool) -> Iterator[dict[str, Any]]:
    """Yield the embeddings as objects of JSON: rows of float32 [n, dimensions], or base64 of their bytes."""
    for index, row in enumerate(np.ascontiguousarray(embeddings, dtype="<f4")):
        yield {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(row).decode() if as_base64 else row,
        }


def _check_ends(engine: PrefillEngine, source: Source) -> None:
    """Raise InvalidInput for token ids that lack the special tokens around every text of the model.

    Ids of another tokenizer lack them. Clients of OpenAI may send such ids, and their embeddings would mean
    nothing.
    """
    if not isinstance(source, TokenSequences):
        return
    frame = engine.tokenizer.frame(bare_prompt(engine))
    before, after = frame.before, frame.after
    for index, ids in enumerate(source.sequences):
        if ids[: len(before)] != before or ids[len(ids) - len(after) :] != after:
            raise InvalidInput(
                f"input[{index}] does not begin and end with the special tokens of this model ({before} and "
                f"{after}), so its ids seem to be those of another tokenizer: send text (LangChain does with "
                "check_embedding_ctx_length=False), or ids as /tokenize gives them; a server with "
                "--no-check-token-ids accepts all ids",
                field=f"input[{index}]",
            )
