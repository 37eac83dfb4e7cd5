"""POST /: whatever the body and the model are for, as clients of the Hugging Face Hub and of TEI expect.

{"inputs": {"source_sentence": ...}}                      /similarity
{"query": ...}                                            /rerank
{"inputs": ..., "parameters": {"candidate_labels": ...}}  zero-shot classification
{"inputs": ...}                                           /embed, or /predict if the model has classes
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn

import orjson
from pydantic import RootModel

from attncache_core import InvalidInput, NotFinite, PrefillEngine
from service.errors import rename
from service.routes.classify import scored
from service.routes.embed import embed
from service.routes.tei.embeddings import SimilarityRequest, similarity
from service.routes.tei.predict import PredictParameters, PredictRequest, predict
from service.routes.tei.rerank import RerankRequest, rerank
from service.schemas import Body, ClassifyRequest, EmbedRequest, Inputs, Text, Texts
from service.web.call import Answer, Call, CurrentCall


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
    classified = ClassifyRequest.model_validate(
        {
            "inputs": body.inputs,
            "labels": parameters.candidate_labels,
            "multi_label": parameters.multi_label,
            "hypothesis_template": parameters.hypothesis_template,
        }
    )
    try:
        return await scored(call, classified, alone=alone)
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
