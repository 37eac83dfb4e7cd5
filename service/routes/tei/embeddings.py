"""POST /embed_all: an embedding of every token, without pooling. POST /similarity: cosines of embeddings."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from pydantic import Field

from attncache_core import normalize
from attncache_core.heads.vectors import cosine_matrix
from service.batching.sources import prompt_of, source_of
from service.routes.common import answer, check_count, computed, json_list, named
from service.routes.embed import embedding_engine
from service.routes.tei.schemas import CutRequest
from service.schemas import Body, PromptName, Text, Texts, TextsOrIds
from service.web.call import Answer, CurrentCall

_SOURCE, _SENTENCES = "inputs.source_sentence", "inputs.sentences"


class EmbedAllRequest(CutRequest):
    """The body of POST /embed_all."""

    inputs: TextsOrIds = Field(
        description="One text or a list of texts, or the token ids of one text or several."
    )
    prompt_name: PromptName = None


class SimilarityInputs(Body):
    """The texts that are compared."""

    source_sentence: Text = Field(description="The text that all sentences are compared with.")
    sentences: Texts


class SimilarityParameters(CutRequest):
    """How the texts are embedded."""

    prompt_name: PromptName = None


class SimilarityRequest(Body):
    """The body of POST /similarity."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


async def embed_all(call: CurrentCall) -> Answer:
    """Embed every token of the inputs: for each input, one list of numbers per token.

    These are what the model's pooling reads, special tokens included. They are not brought to unit length.
    """
    engine = embedding_engine(call)
    body = await call.read(EmbedAllRequest)
    check_count(call, body.inputs, "inputs")
    source = source_of(body.inputs, call.truncates(body.truncate), body.truncation_direction or "right")
    prompt = prompt_of(engine, source, body.prompt_name)
    reading = replace(
        prompt, sequence_plans=tuple(replace(plan, states=True) for plan in prompt.sequence_plans)
    )
    result = await computed(call, source, prompt=reading, salt=call.salt())
    texts = []
    for states in result.token_states or ():
        texts.append(await json_list(states))
        await asyncio.sleep(0)  # other requests are served
    return answer(texts, result, call)


async def similarity(call: CurrentCall) -> Answer:
    """Compare a text with other texts, by the cosines of their embeddings."""
    engine = embedding_engine(call)
    body = await call.read(SimilarityRequest)
    check_count(call, body.inputs.sentences, _SENTENCES)
    parameters = body.parameters or SimilarityParameters()
    prompt = engine.tokenizer.named_prompt(parameters.prompt_name)
    source = source_of(
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
