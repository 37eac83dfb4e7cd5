"""POST /similarity: the cosines of a text's embedding to the embeddings of other texts."""

from __future__ import annotations

from attncache_core import normalize
from attncache_core.heads.vectors import cosine_matrix
from service.batching.sources import Texts
from service.routes.common import answer, check_count, computed, named
from service.routes.embed import embedding_engine
from service.routes.tei.schemas import SimilarityParameters, SimilarityRequest
from service.web.call import Answer, CurrentCall

_SOURCE, _SENTENCES = "inputs.source_sentence", "inputs.sentences"


async def similarity(call: CurrentCall) -> Answer:
    """Compare a text with other texts, by the cosines of their embeddings."""
    engine = embedding_engine(call)
    body = await call.read(SimilarityRequest)
    check_count(body.inputs.sentences, _SENTENCES, call.state.settings.max_request_inputs)
    parameters = body.parameters or SimilarityParameters()
    prompt = engine.tokenizer.named_prompt(parameters.prompt_name)
    source = Texts(
        [body.inputs.source_sentence, *body.inputs.sentences],
        call.truncates(parameters.truncate),
        parameters.truncation_direction or "right",
    )
    with named(_SENTENCES, _name):
        result = await computed(call, source, prompt=prompt, salt=call.salt())
    embeddings = normalize(result.outputs)
    return answer(cosine_matrix(embeddings[1:], embeddings[:1])[:, 0], result, call)


def _name(index: int) -> str:
    return f"{_SENTENCES}[{index - 1}]" if index else _SOURCE
