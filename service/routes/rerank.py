"""POST /rerank: documents, best first for a query.

texts                   as clients of text-embeddings-inference send and read them
documents               as clients of Cohere, Jina and vLLM send and read them

a model of pairs        query and document, as one sequence -> a logit -> sigmoid
an embedding model      embedding of the query . embedding of the document, both of unit length
a decoder, segments     all documents in one prompt; see heads/decisions.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from attncache_core import (
    InputTooLong,
    InvalidInput,
    NotFinite,
    PrefillEngine,
    PrefillResult,
    class_scores,
    normalize,
)
from attncache_core.checkpoints.template import Text as TextOrPair
from attncache_core.engine.result import joined
from attncache_core.heads.decisions import listwise_headings
from attncache_core.heads.vectors import cosine_matrix
from attncache_core.text.limits import NoRoomBesideQuery
from attncache_core.text.prompts import Prompt
from service.batching import sources
from service.errors import rename
from service.routes.classify import best_first, by_tokens
from service.routes.common import answer, check_count, computed, named
from service.routes.inputs import segments_of
from service.routes.openai import ModelName, Salt, Usage, User, check_model_name, served_name, usage_of
from service.schemas import REFUSED, Body, Text, Texts, Truncate, TruncationDirection
from service.web.call import Answer, Call, CurrentCall

# The names of prompts that sentence-transformers knows for queries and documents. There, an empty prompt
# `document` of its own comes before one that the folder calls otherwise; here, the folder's is used.
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


def _plain(document: Any) -> Any:
    """Return the text of {"text": ..., "title": ...}, as Cohere's and Jina's clients may send a document."""
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise PydanticCustomError(REFUSED, "must be a string, or an object with a string in the field text")
    return text


Document = Annotated[Text, BeforeValidator(_plain, json_schema_input_type=str | dict[str, Any])]


class RerankRequest(Body):
    """The body of POST /rerank."""

    query: Text
    texts: Texts | None = Field(None, description="The documents, for a response as a list.")
    segments: Texts | None = Field(
        None,
        description="The documents, to be read together in one prompt (listwise) by a decoder with --task "
        "label-logits, at most 26. The response is as for documents. Keys and values of documents are "
        "reused in any order, with --blend.",
    )
    documents: Annotated[list[Document], Field(min_length=1, fail_fast=True)] | None = Field(
        None,
        description="The documents, instead of texts, for a response as an object with results. Of an "
        "object, only the field text is read.",
    )
    model: ModelName = None
    top_n: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Return this many of the best documents. Default, and 0: all."
    )
    return_text: bool | None = Field(None, description="With texts: return the texts too.")
    return_documents: bool | None = Field(None, description="With documents: return the documents too.")
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Accepted, because clients send it, if it is 0 (no limit) or not below the model's "
        "maximum, to which query and document are cut.",
    )
    user: User = None
    priority: int | None = Field(None, description="Accepted, because clients send it. Changes nothing.")
    raw_scores: bool | None = Field(
        None, description="Return the logits of a model of pairs, instead of numbers between 0 and 1."
    )
    instruction: Text | None = Field(
        None,
        description="Says what a query asks for, instead of the instruction in the server's template. Only "
        "for a template that holds an instruction.",
    )
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    cache_salt: Salt = None


class Rank(BaseModel):
    """A document of `texts`."""

    index: int
    score: float
    text: str | None = None


class RankedText(BaseModel):
    """The text of a document."""

    text: str


class RankedDocument(BaseModel):
    """A document of `documents`."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranked(BaseModel):
    """The response to a request with `documents`."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage


class Relevance(NamedTuple):
    """The scores of documents, higher is better."""

    logits: np.ndarray  # float32 [documents], in the order of the scores
    scores: np.ndarray  # float32 [documents]
    result: PrefillResult  # of all sequences

    @property
    def best_first(self) -> list[int]:
        """The indices of the documents, the best document first."""
        return best_first(self.logits)


async def rerank(call: CurrentCall) -> Answer:
    """Order documents by how well they answer a query.

    A cross-encoder, or a reranker in its template, scores each pair of query and document. An embedding model
    scores by the cosine of both embeddings, with the model's prompts for queries and documents.
    """
    body = await call.read(RerankRequest)
    check_model_name(body.model, call.state.settings)
    field, documents = _documents(body)
    maximum = call.engine.tokenizer.max_tokens
    if body.max_tokens_per_doc and body.max_tokens_per_doc < maximum:
        raise InvalidInput(
            f"max_tokens_per_doc must be at least {maximum}, the maximum of the model, to which documents "
            "are cut; leave it out",
            field="max_tokens_per_doc",
        )
    if field == "segments":
        found = await _by_list(call, body.query, documents, call.salt(body.cache_salt))
        return answer(_of_documents(found, documents, body, call), found.result, call)
    check_count(call, documents, field)
    found = await _relevance(call, body, field, documents)
    make = _of_texts if field == "texts" else _of_documents
    return answer(make(found, documents, body, call), found.result, call)


def _documents(body: RerankRequest) -> tuple[str, list[str]]:
    """Return the field with the documents, and the documents. Raises InvalidInput."""
    fields = [name for name in ("texts", "documents", "segments") if getattr(body, name) is not None]
    if len(fields) != 1:
        raise InvalidInput("give one of texts, documents and segments", field=(fields or ["texts"])[-1])
    if body.segments is not None:
        for name in ("raw_scores", "instruction", "truncate", "truncation_direction", "return_text"):
            if getattr(body, name):
                raise InvalidInput(f"{name} is not accepted with segments; leave it out", field=name)
        return "segments", body.segments
    if body.texts is not None:
        if body.return_documents:
            raise InvalidInput(
                "return_documents belongs to documents; with texts, send return_text",
                field="return_documents",
            )
        return "texts", body.texts
    assert body.documents is not None
    if body.return_text:
        raise InvalidInput(
            "return_text belongs to texts; with documents, send return_documents", field="return_text"
        )
    return "documents", body.documents


def _of_texts(found: Relevance, texts: list[str], body: RerankRequest, call: Call) -> Any:  # noqa: ARG001
    scores = found.scores.tolist()
    return [
        {"index": index, **({"text": texts[index]} if body.return_text else {}), "score": scores[index]}
        for index in found.best_first[: body.top_n or None]
    ]


def _of_documents(found: Relevance, documents: list[str], body: RerankRequest, call: Call) -> Any:
    scores = found.scores.tolist()
    return {
        "id": f"rerank-{call.request_id}",
        "model": served_name(call.state.settings),
        "results": [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": {"text": documents[index]}} if body.return_documents else {}),
            }
            for index in found.best_first[: body.top_n or None]
        ],
        "usage": usage_of(found.result, call.state.settings),
    }


async def _relevance(call: Call, body: RerankRequest, field: str, documents: list[str]) -> Relevance:
    """Score the documents of a request. field: the field of the body that holds them.

    Embeddings are scored by cosines, whatever `raw_scores` says. Raises InvalidInput if the model is neither
    one of pairs nor one of embeddings, and as Batcher.submit.
    """
    if call.engine.decisions.scores_pairs:
        return await _by_pairs(call, body, field, documents)
    if call.engine.checkpoint.task != "embed":
        call.engine.decisions.require_pairs()
    if body.instruction is not None:
        raise InvalidInput(
            "instruction is accepted only by a model of pairs whose template holds an instruction",
            field="instruction",
        )
    return await _by_embedding(call, body, field, documents)


async def _by_list(call: Call, query: str, documents: list[str], salt: bytes) -> Relevance:
    """Score documents that a decoder reads together in one prompt; see heads/decisions.py.

    The scores sum to 1. Raises InvalidInput if the server has another task, and as Batcher.submit.
    """
    if call.engine.checkpoint.task != "label-logits":
        raise InvalidInput(
            "segments are read in one prompt by a decoder that scores labels (--task label-logits); send "
            "texts or documents to this server",
            field="segments",
        )
    source = segments_of(call, documents, query, listwise_headings(len(documents)))
    found = await by_tokens(call, source, call.engine.decisions.letters, salt=salt)
    logits = found.logits[:, : len(documents)]
    return Relevance(logits[0], class_scores(logits)[0], found.result)


async def _by_pairs(call: Call, body: RerankRequest, field: str, documents: list[str]) -> Relevance:
    engine = call.engine
    # The documents of a request share the tokens of instruction and query, if the model is causal.
    source = _source(call, body, [(body.query, document) for document in documents])
    try:
        with named(field):
            result = await computed(
                call,
                source,
                prompt=engine.decisions.pair_prompt(body.instruction),
                labels=engine.decisions.label_tokens if body.instruction is None else None,
                salt=call.salt(body.cache_salt),
            )
    except InvalidInput as error:
        if isinstance(error, InputTooLong):
            await asyncio.to_thread(_require_short_query, engine, body.query, error)
        elif isinstance(error, NoRoomBesideQuery):
            rename(error, "query")
        raise
    # In a thread, as in by_tokens: the model may be a decoder whose labels are scored.
    try:
        logits = await asyncio.to_thread(
            engine.decisions.pair_logits, result.outputs, result.log_probabilities
        )
    except NotFinite as error:
        rename(error, f"{field}[{error.index}]")
        raise
    scores = logits if body.raw_scores else class_scores(logits, multi_label=True)
    return Relevance(logits, scores, result)


def _require_short_query(engine: PrefillEngine, query: str, error: InputTooLong) -> None:
    """Raise InputTooLong, which names the query, if the query leaves no room for a document."""
    maximum = engine.tokenizer.max_tokens
    if len(engine.tokenizer.turns([query], "query")[0]) >= maximum:
        raise InputTooLong(
            f"query has {maximum} tokens or more, which leaves no room for a document; shorten the query",
            field="query",
        ) from error


def _source(call: Call, body: RerankRequest, texts: Sequence[TextOrPair]) -> sources.Texts:
    return sources.Texts(texts, call.truncates(body.truncate), body.truncation_direction or "right")


async def _by_embedding(call: Call, body: RerankRequest, field: str, documents: list[str]) -> Relevance:
    engine = call.engine

    async def embedded(texts: list[str], prompt: Prompt | None, queries: int) -> PrefillResult:
        """Compute texts. queries: number of texts at the front that are the query."""

        def name(index: int) -> str:
            return "query" if index < queries else f"{field}[{index - queries}]"

        source = _source(call, body, texts)
        with named(field, name):
            return await computed(call, source, prompt=prompt, salt=call.salt(body.cache_salt))

    of_query, of_documents = (_prompt(engine, names) for names in (_QUERY_PROMPTS, _DOCUMENT_PROMPTS))
    if of_query == of_documents:
        result = await embedded([body.query, *documents], of_query, 1)
    else:
        query = await embedded([body.query], of_query, 1)
        answers = await embedded(documents, of_documents, 0)
        ends = len(query), len(query) + len(answers)
        result = joined([query, answers], [range(ends[0]), range(*ends)])
    embeddings = normalize(result.outputs)
    cosines = cosine_matrix(embeddings[1:], embeddings[:1])[:, 0]
    return Relevance(cosines, cosines, result)


def _prompt(engine: PrefillEngine, names: tuple[str, ...]) -> Prompt | None:
    """Return the first prompt of these names that the model has; None: the template of the operator, if any.

    As in sentence-transformers, a query or a document without a prompt of its own gets no default prompt.
    """
    known = engine.checkpoint.prompts
    if named := next((name for name in names if name in known), None):
        return engine.tokenizer.named_prompt(named)
    return sources.bare_prompt(engine) if engine.checkpoint.default_prompt else None
