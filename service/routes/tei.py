"""The routes of text-embeddings-inference (TEI) beside /embed, in its shapes.

POST /embed_all     an embedding of every token, without pooling
POST /similarity    cosines of embeddings
POST /predict       texts, or pairs of texts, to the server's labels with scores
POST /              one of the routes below, as the body and the model say, also for clients of the Hub

{"inputs": {"source_sentence": ...}}                      /similarity
{"query": ...}                                            /rerank
{"inputs": ..., "parameters": {"candidate_labels": ...}}  zero-shot classification
{"inputs": ...}                                           /embed, or /predict if the model has classes
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import numpy as np
import orjson
from pydantic import BaseModel, Field, PlainValidator, RootModel, TypeAdapter
from pydantic_core import PydanticCustomError

from attncache_core import InvalidInput, NotFinite, PrefillEngine, normalize
from attncache_core.checkpoints.template import Text as TextOrPair
from attncache_core.heads.vectors import cosine_matrix
from service.batching import sources
from service.errors import rename
from service.routes.classify import Classified, best_first, classified, scored
from service.routes.common import answer, check_count, computed, json_list, json_lists, named
from service.routes.embed import embed, embedding_engine
from service.routes.inference_route import ERRORS, Api
from service.routes.rerank import RerankRequest, rerank
from service.schemas import (
    REFUSED,
    Body,
    ClassifyRequest,
    EmbedRequest,
    Inputs,
    PromptName,
    Text,
    Texts,
    TextsOrIds,
    Truncate,
    TruncationDirection,
    checked_text,
)
from service.web.call import Answer, Call, CurrentCall

_SOURCE, _SENTENCES = "inputs.source_sentence", "inputs.sentences"
# They name the place of a text that is not accepted.
_TEXTS: TypeAdapter[list[str]] = TypeAdapter(list[Text])
_LISTS: TypeAdapter[list[list[str]]] = TypeAdapter(Annotated[list[list[Text]], Field(fail_fast=True)])


class CutRequest(Body):
    """What the bodies of routes hold that cut texts."""

    truncate: Truncate = None
    truncation_direction: TruncationDirection = None


class TeiErrorBody(BaseModel):
    """The body of every error response of these routes."""

    error: str = Field(examples=["inputs[3] must not be empty"])
    error_type: Literal["Validation", "Overloaded", "Backend", "Unhealthy"]


TEI = Api(
    "text-embeddings-inference",
    {status: {**documented, "model": TeiErrorBody} for status, documented in ERRORS.items() if status != 404},
)


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
    source = sources.source_of(
        body.inputs, call.truncates(body.truncate), body.truncation_direction or "right"
    )
    prompt = sources.prompt_of(engine, source, body.prompt_name)
    reading = replace(
        prompt, sequence_plans=tuple(replace(plan, states=True) for plan in prompt.sequence_plans)
    )
    result = await computed(call, source, prompt=reading, salt=call.salt())
    return answer(await json_lists(result.token_states or (), call), result, call)


async def similarity(call: CurrentCall) -> Answer:
    """Compare a text with other texts, by the cosines of their embeddings."""
    engine = embedding_engine(call)
    body = await call.read(SimilarityRequest)
    check_count(call, body.inputs.sentences, _SENTENCES)
    parameters = body.parameters or SimilarityParameters()
    prompt = engine.tokenizer.named_prompt(parameters.prompt_name)
    source = sources.source_of(
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


class Predicted(NamedTuple):
    """What a request for predictions is about."""

    texts: list[TextOrPair]
    is_list: bool  # whether the response is a list with an element per text


def _predicted(inputs: Any) -> Predicted:
    """Return the texts and pairs of "text", ["text"], ["one", "other"], or [["text"], ["one", "other"]]."""
    if isinstance(inputs, str):
        return Predicted([checked_text(inputs)], False)
    if not isinstance(inputs, list) or not inputs:
        raise _not_predictable("")
    if isinstance(inputs[0], list):
        for index, each in enumerate(inputs):
            _check_form(each, f"[{index}]")
        return Predicted([_text_or_pair(each) for each in _LISTS.validate_python(inputs)], True)
    _check_form(inputs, "")
    return Predicted([_text_or_pair(_TEXTS.validate_python(inputs))], False)


def _check_form(texts: Any, where: str) -> None:
    if not isinstance(texts, list) or len(texts) not in (1, 2):
        raise _not_predictable(where)
    if not all(isinstance(text, str) for text in texts):
        raise _not_predictable(where)


def _text_or_pair(texts: list[str]) -> TextOrPair:
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _not_predictable(where: str) -> PydanticCustomError:
    return PydanticCustomError(
        REFUSED,
        "must be a text, a pair [text, text], or a list of [text] and [text, text]{where}",
        {"where": f"; element {where} is neither" if where else ""},
    )


class PredictParameters(Body):
    """The parameters that clients of the Hugging Face Hub send to classify texts."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="What makes scores of logits. Default: what the model was trained with."
    )
    top_k: Annotated[int, Field(gt=0)] | None = Field(
        None, description="Return this many of the best labels. Default: all."
    )


class PredictRequest(CutRequest):
    """The body of POST /predict."""

    inputs: Annotated[
        Predicted,
        PlainValidator(
            _predicted,
            json_schema_input_type=Text
            | Annotated[list[Text], Field(min_length=1, max_length=2)]
            | Annotated[list[Annotated[list[Text], Field(min_length=1, max_length=2)]], Field(min_length=1)],
        ),
    ] = Field(description="A text, a pair [text, text], or a list of [text] and [text, text].")
    raw_scores: bool = Field(False, description="Return logits instead of probabilities.")
    parameters: PredictParameters | None = Field(
        None,
        description="Sent by clients of the Hugging Face Hub. With it, the response to one text is a list "
        "with one element, too.",
    )


async def predict(call: CurrentCall) -> Answer:
    """Score the labels of the server for each text or pair, best first."""
    body = await call.read(PredictRequest)
    check_count(call, body.inputs.texts, "inputs")
    if body.parameters is not None and not body.inputs.is_list and isinstance(body.inputs.texts[0], tuple):
        # A pair for clients of text-embeddings-inference, and two texts for those that send parameters.
        raise InvalidInput(
            "inputs with parameters must not be a list of two texts; send [[text], [text]] for two texts, or "
            "[[text, text]] for a pair",
            field="inputs",
        )
    if body.raw_scores and body.parameters and body.parameters.function_to_apply not in (None, "none"):
        raise InvalidInput(
            "raw_scores is not accepted with another function_to_apply than none; leave one of them out",
            field="raw_scores",
        )
    source = sources.Texts(
        body.inputs.texts, call.truncates(body.truncate), body.truncation_direction or "right"
    )
    found = await classified(call, source, salt=call.salt())
    maximum = body.parameters.top_k if body.parameters else None
    rows_of_scores = zip(found.logits, _scores(found, body).tolist(), strict=True)
    rows = (
        [{"score": scores[column], "label": found.labels[column]} for column in best_first(logits)[:maximum]]
        for logits, scores in rows_of_scores
    )
    is_list = body.inputs.is_list or body.parameters is not None
    return answer(await json_list(rows, call) if is_list else next(rows), found.result, call)


def _scores(found: Classified, body: PredictRequest) -> np.ndarray:
    """Return scores, float32 [texts, labels], as the request asks for."""
    function = body.parameters.function_to_apply if body.parameters else None
    if body.raw_scores or function == "none":
        return found.logits
    return found.scores(None if function is None else function == "sigmoid")


class ZeroShotParameters(Body):
    """The labels, and how they are scored."""

    candidate_labels: Texts
    multi_label: bool | None = None
    hypothesis_template: Text | None = None


class ZeroShotRequest(Body):
    """The body for zero-shot classification."""

    inputs: Inputs
    parameters: ZeroShotParameters


class TaskRequest(
    RootModel[EmbedRequest | PredictRequest | SimilarityRequest | RerankRequest | ZeroShotRequest]
):
    """The body of POST /."""


async def task(call: CurrentCall) -> Answer:
    """Embed, classify, compare or rank, as the body and the model say."""
    return await _handler(await call.content(), call.engine)(call)


def _handler(content: bytes, engine: PrefillEngine) -> Callable[[Call], Awaitable[Answer]]:
    """Return what answers a request with this body, and also raises the errors for it."""
    classes = engine.checkpoint.task != "embed"
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    parameters = body.get("parameters")
    inputs = body.get("inputs")
    if isinstance(inputs, dict) and (not classes or "source_sentence" in inputs):
        return similarity
    if "query" in body and (classes or "segments" not in body):
        return rerank
    if isinstance(parameters, dict) and "candidate_labels" in parameters:
        return partial(_zero_shot, alone=not isinstance(inputs, list))
    if classes or (parameters is not None and engine.decisions.labels):
        return predict
    if parameters == {}:
        return partial(_embed, {name: value for name, value in body.items() if name != "parameters"})
    if parameters is not None and _classify(parameters):
        return predict
    return embed if parameters is None else _refuse_parameters


def _classify(parameters: object) -> bool:
    """Return whether parameters are what clients send to classify, and a server without labels refuses."""
    return isinstance(parameters, dict) and parameters.keys() <= PredictParameters.model_fields.keys()


async def _embed(body: dict[str, object], call: Call) -> Answer:
    call.content_read = orjson.dumps(body)
    return await embed(call)


async def _refuse_parameters(call: Call) -> NoReturn:  # noqa: ARG001
    raise InvalidInput(
        "parameters is taken only to classify or to compare texts; to embed, send its fields beside inputs",
        field="parameters",
    )


async def _zero_shot(call: Call, *, alone: bool) -> Answer:
    body = await call.read(ZeroShotRequest)
    parameters = body.parameters
    request = ClassifyRequest.model_validate(
        {
            "inputs": body.inputs,
            "labels": parameters.candidate_labels,
            "multi_label": parameters.multi_label,
            "hypothesis_template": parameters.hypothesis_template,
        }
    )
    try:
        return await scored(call, request, alone=alone)
    except (InvalidInput, NotFinite) as error:
        _rename(error)
        raise


def _rename(error: InvalidInput | NotFinite) -> None:
    """Let an error about a field of ClassifyRequest name the field of ZeroShotRequest."""
    field = error.field or ""
    if field.startswith("labels"):
        rename(error, f"parameters.candidate_{field}")
    elif field in ("hypothesis_template", "multi_label"):
        rename(error, f"parameters.{field}")
