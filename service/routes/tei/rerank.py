"""POST /rerank: documents, best first for a query.

texts           as clients of text-embeddings-inference send and read them
documents       as clients of Cohere, Jina and vLLM send and read them
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from attncache_core import InvalidInput
from service.routes.common import answer, check_count
from service.routes.openai.models import check_model_name, served_name
from service.routes.openai.schemas import ModelName, Salt, Usage, User, usage_of
from service.routes.relevance import Question, Relevance, by_list, relevance
from service.schemas import REFUSED, Body, Text, Texts, Truncate, TruncationDirection
from service.web.call import Answer, Call, CurrentCall


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
        found = await by_list(call, body.query, documents, call.salt(body.cache_salt))
        return answer(_of_documents(found, documents, body, call), found.result, call)
    check_count(call, documents, field)
    question = Question(
        body.query,
        documents,
        field,
        call.truncates(body.truncate),
        body.truncation_direction or "right",
        body.instruction,
        call.salt(body.cache_salt),
    )
    found = await relevance(call, question, raw=bool(body.raw_scores))
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
