"""POST /classify: texts to labels with scores.

a classifier is served    rows -> class logits (-> the labels asked for) -> softmax, or sigmoid (multi-label)
label-logits are served   rows -> logits of the labels' tokens -> softmax
labels are given          rows . label embeddings, both of unit length -> softmax
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from attncache_core import InputTooLong, InvalidInput, NoClassifier, NotFinite, class_scores, normalize
from attncache_core.classifier import SIMILARITY_TEMPERATURE
from attncache_core.outputs import require_finite
from attncache_core.prompts import Template
from service.bodies import body_documentation, read_body, reuse_wanted
from service.errors import TooManyInputs
from service.routes.common import (
    ANSWER_HEADERS,
    ERRORS,
    answer,
    check_count,
    rows_unless_gone,
    serving_of,
    state_of,
)
from service.schemas import ClassifyRequest, LabelScore
from service.state import Serving

router = APIRouter()

_CLASSIFIER_TEMPERATURE = 1.0
# An answer repeats the labels for each input: of a body of 2 MB it could make one of 250.
_MOST_ANSWER_CHARACTERS = 2**24


@dataclass(frozen=True, slots=True)
class _Choice:
    """The labels to score, and where each of them comes from."""

    labels: list[str]
    columns: list[int] | None  # of the classifier's logits, one a label
    embeddings: np.ndarray | None  # [labels, dimensions], of unit length; instead of columns

    def scores(self, outputs: np.ndarray, serving: Serving, temperature: float | None) -> np.ndarray:
        """[sequences, labels]: rows that sum to 1, or those of a multi-label model."""
        if self.embeddings is not None:
            cosines = normalize(outputs) @ self.embeddings.T
            return class_scores(cosines, temperature or SIMILARITY_TEMPERATURE)
        logits = serving.engine.class_logits(outputs)[:, self.columns]
        return class_scores(logits, temperature or _CLASSIFIER_TEMPERATURE, serving.engine.multi_label)


@router.post(
    "/classify",
    response_model=list[list[LabelScore]],
    responses={
        200: {"headers": ANSWER_HEADERS, "description": "For each input its labels, best first."},
        **ERRORS,
    },
    openapi_extra=body_documentation(ClassifyRequest),
)
async def classify(request: Request) -> Response:
    """Score the labels given, or those of the served classifier, for each input."""
    state = state_of(request)
    serving = serving_of(request)
    reuse = reuse_wanted(request)
    body = await read_body(request, ClassifyRequest, state.settings.max_body_bytes)
    check_count(body.inputs, "inputs", state.settings.max_request_inputs)
    truncate = state.settings.truncate if body.truncate is None else body.truncate
    if serving.engine.task == "label-logits":
        return await _by_tokens(request, serving, body, truncate, reuse)
    if body.template is not None:
        raise InvalidInput(
            "template is for labels that are scored by their tokens, with --task label-logits",
            field="template",
        )
    if serving.engine.labels is not None:
        choice = _among_known(body.labels, serving.engine.labels)
    else:
        if body.labels is None:
            raise NoClassifier("no classifier is served: give labels to choose from", field="labels")
        labels = body.labels
        _check_labels(labels, len(body.inputs), state.settings.max_request_inputs)
        choice = _Choice(labels, None, await _label_embeddings(request, serving, labels, truncate))
    rows = await rows_unless_gone(
        request, serving.batcher.submit(body.inputs, truncate=truncate, reuse=reuse)
    )
    scores = choice.scores(rows.outputs, serving, body.temperature)
    return answer([_best_first(choice.labels, row) for row in scores], rows, state.settings)


async def _by_tokens(
    request: Request, serving: Serving, body: ClassifyRequest, truncate: bool, reuse: bool
) -> Response:
    """Score labels by the logits of their tokens behind the template."""
    state, engine = state_of(request), serving.engine
    if body.labels is not None:
        _check_labels(body.labels, len(body.inputs), state.settings.max_request_inputs)
    template = None if body.template is None else Template.parse(body.template)
    # In a thread: a template may be long, and labels many.
    asked = await asyncio.to_thread(engine.labels_in, template, body.labels)
    sequences, most = len(body.inputs) * len(asked.prompt.readings), state.settings.max_queue_sequences
    if sequences > most:
        raise TooManyInputs(
            f"inputs make {sequences} sequences with these labels, and at most {most} may wait",
            field="inputs" if len(asked.prompt.readings) <= most else "labels",
        )
    reuse = reuse and engine.keeps_budget(asked)
    pending = serving.batcher.submit(body.inputs, truncate=truncate, reuse=reuse, prompt=asked.prompt)
    rows = await rows_unless_gone(request, pending)
    # In a thread too: of many labels there is as much to add up.
    logits = await asyncio.to_thread(engine.label_logits, asked, rows.outputs, rows.log_probabilities)
    # Of finite outputs: what is not finite is a label's row of the language head.
    require_finite(np.isfinite(logits).T, "labels")
    scores = class_scores(logits, body.temperature or _CLASSIFIER_TEMPERATURE)
    return answer([_best_first(list(asked.labels), row) for row in scores], rows, state.settings)


def _among_known(asked: list[str] | None, known: tuple[str, ...]) -> _Choice:
    columns = {label: column for column, label in enumerate(known)}
    if asked is None:
        return _Choice(list(known), list(columns.values()), None)
    _refuse_duplicates(asked)
    for index, label in enumerate(asked):
        if label not in columns:
            field = f"labels[{index}]"
            raise InvalidInput(f"{field} is none of the classifier's labels; /info lists them", field=field)
    return _Choice(asked, [columns[label] for label in asked], None)


def _check_labels(labels: list[str], inputs: int, limit: int) -> None:
    """Raise TooManyInputs for too many labels or too long ones, InvalidInput for two that are alike."""
    check_count(labels, "labels", limit)
    _refuse_duplicates(labels)
    characters = inputs * sum(map(len, labels))
    if characters > _MOST_ANSWER_CHARACTERS:
        raise TooManyInputs(
            f"the answer repeats the labels for each input: {characters} characters, and at most "
            f"{_MOST_ANSWER_CHARACTERS} are sent; give fewer inputs or shorter labels",
            field="labels",
        )


def _refuse_duplicates(labels: list[str]) -> None:
    seen: set[str] = set()
    for index, label in enumerate(labels):
        if label in seen:
            raise InvalidInput(f"labels[{index}] is there twice", field=f"labels[{index}]")
        seen.add(label)


async def _label_embeddings(
    request: Request, serving: Serving, labels: list[str], truncate: bool
) -> np.ndarray:
    """[labels, dimensions], of unit length; only labels not met before are computed, always without reuse."""
    known = serving.label_memory.recall(labels, truncate)
    missing = [label for label in labels if label not in known]
    if missing:
        # A label is no text of the client's: it is neither in the header's count nor in the metric's.
        pending = serving.batcher.submit(missing, truncate=truncate, reuse=False, counted=False)
        try:
            rows = await rows_unless_gone(request, pending)
        except NotFinite as error:
            raise NotFinite.of(labels.index(missing[error.index]), "labels") from error
        except InputTooLong as error:
            # Its field would name an input.
            raise InputTooLong(
                "labels have more tokens than the model or a request takes; shorten them", field="labels"
            ) from error
        embeddings = normalize(rows.outputs)
        serving.label_memory.remember(missing, truncate, embeddings)
        known.update(zip(missing, embeddings, strict=True))
    return np.stack([known[label] for label in labels])


def _best_first(labels: list[str], scores: np.ndarray) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable").tolist()
    values = scores.tolist()
    return [{"label": labels[column], "score": values[column]} for column in order]
