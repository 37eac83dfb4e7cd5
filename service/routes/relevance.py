"""How well documents answer a query.

a model of pairs        query and document, as one sequence -> a logit -> sigmoid
an embedding model      embedding of the query . embedding of the document, both of unit length
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np

from attncache_core import (
    InputTooLong,
    InvalidInput,
    PrefillEngine,
    PrefillResult,
    class_scores,
    normalize,
)
from attncache_core.engine.result import joined
from attncache_core.heads.decisions import headings
from attncache_core.heads.vectors import cosine_matrix
from attncache_core.text.limits import NoRoomBesideQuery
from attncache_core.text.prompts import Prompt
from service.batching.sources import Texts, bare_prompt
from service.errors import rename
from service.routes.classify import best_first, by_tokens
from service.routes.common import computed, named
from service.routes.inputs import segments_of
from service.schemas import Side
from service.web.call import Call

# The names of prompts that sentence-transformers knows for queries and documents. There, an empty prompt
# `document` of its own comes before one that the folder calls otherwise; here, the folder's is used.
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


class Question(NamedTuple):
    """A query, and the documents that may answer it."""

    query: str
    documents: list[str]
    field: str  # of the request, that holds the documents
    truncate: bool
    cut: Side = "right"
    instruction: str | None = None  # replaces the instruction of the model's template
    salt: bytes = b""


class Relevance(NamedTuple):
    """The scores of documents, higher is better."""

    logits: np.ndarray  # float32 [documents], in the order of the scores
    scores: np.ndarray  # float32 [documents]
    result: PrefillResult  # of all sequences

    @property
    def best_first(self) -> list[int]:
        """The indices of the documents, the best document first."""
        return best_first(self.logits)


async def relevance(call: Call, question: Question, *, raw: bool) -> Relevance:
    """Score the documents of a question.

    raw: return logits instead of scores between 0 and 1; embeddings have cosines in either case. Raises
    InvalidInput if the model is neither one of pairs nor one of embeddings, and as Batcher.submit.
    """
    if call.engine.decisions.scores_pairs:
        return await _by_pairs(call, question, raw)
    if call.engine.checkpoint.task != "embed":
        call.engine.decisions.require_pairs()
    if question.instruction is not None:
        raise InvalidInput(
            "instruction is accepted only by a model of pairs whose template holds an instruction",
            field="instruction",
        )
    return await _by_embedding(call, question)


async def by_list(call: Call, query: str, documents: list[str], salt: bytes) -> Relevance:
    """Score documents that a decoder reads together in one prompt; see heads/decisions.py.

    The scores sum to 1. Raises InvalidInput if the server has another task, and as Batcher.submit.
    """
    if call.engine.checkpoint.task != "label-logits":
        raise InvalidInput(
            "segments are read in one prompt by a decoder that scores labels (--task label-logits); send "
            "texts or documents to this server",
            field="segments",
        )
    source = segments_of(call, documents, query, headings(len(documents)))
    found = await by_tokens(call, source, call.engine.decisions.letters, salt=salt)
    logits = found.logits[:, : len(documents)]
    return Relevance(logits[0], class_scores(logits)[0], found.result)


async def _by_pairs(call: Call, question: Question, raw: bool) -> Relevance:
    engine = call.engine
    # The documents of a request share the tokens of instruction and query, if the model is causal.
    source = Texts(
        [(question.query, document) for document in question.documents], question.truncate, question.cut
    )
    is_default = question.instruction is None
    try:
        with named(question.field):
            result = await computed(
                call,
                source,
                prompt=engine.decisions.pair_prompt(question.instruction),
                labels=engine.decisions.label_tokens if is_default else None,
                salt=question.salt,
            )
    except InvalidInput as error:
        if isinstance(error, InputTooLong):
            await asyncio.to_thread(_require_short_query, engine, question.query, error)
        elif isinstance(error, NoRoomBesideQuery):
            rename(error, "query")
        raise
    # In a thread, as in by_tokens: the model may be a decoder whose labels are scored.
    logits = await asyncio.to_thread(engine.decisions.pair_logits, result.outputs, result.log_probabilities)
    return Relevance(logits, logits if raw else class_scores(logits, multi_label=True), result)


def _require_short_query(engine: PrefillEngine, query: str, error: InputTooLong) -> None:
    """Raise InputTooLong, which names the query, if the query leaves no room for a document."""
    maximum = engine.tokenizer.max_tokens
    if len(engine.tokenizer.turns([query], "query")[0]) >= maximum:
        raise InputTooLong(
            f"query has {maximum} tokens or more, which leaves no room for a document; shorten the query",
            field="query",
        ) from error


async def _by_embedding(call: Call, question: Question) -> Relevance:
    engine = call.engine

    async def embedded(texts: list[str], prompt: Prompt | None, queries: int) -> PrefillResult:
        """Compute texts. queries: number of texts at the front that are the query."""

        def name(index: int) -> str:
            return "query" if index < queries else f"{question.field}[{index - queries}]"

        source = Texts(texts, question.truncate, question.cut)
        with named(question.field, name):
            return await computed(call, source, prompt=prompt, salt=question.salt)

    of_query, of_documents = (_prompt(engine, names) for names in (_QUERY_PROMPTS, _DOCUMENT_PROMPTS))
    if of_query == of_documents:
        result = await embedded([question.query, *question.documents], of_query, 1)
    else:
        query = await embedded([question.query], of_query, 1)
        documents = await embedded(question.documents, of_documents, 0)
        ends = len(query), len(query) + len(documents)
        result = joined([query, documents], [range(ends[0]), range(*ends)])
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
    return bare_prompt(engine) if engine.checkpoint.default_prompt else None
