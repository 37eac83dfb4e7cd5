"""POST /classify: texts to labels with scores.

the model has classes       outputs -> class logits (-> requested labels) -> softmax, or sigmoid (multi-label)
the task is label-logits    outputs -> logits of the labels' tokens -> softmax
the request has labels      outputs . label embeddings, both of unit length -> softmax
the model is one of NLI     see service/routes/zero_shot.py
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np

from attncache_core import InvalidInput, NoClassifier, class_scores, normalize
from attncache_core.checkpoints.template import Template
from attncache_core.heads.classifier import SIMILARITY_TEMPERATURE
from attncache_core.heads.comparator import Measure
from attncache_core.heads.vectors import cosine_matrix
from attncache_core.text.limits import require_distinct
from service.batching.sources import Source, Texts
from service.errors import TooManyInputs
from service.routes.common import answer, best_first, check_count, computed, json_list, label_logits, named
from service.routes.inputs import answered
from service.routes.zero_shot import Scores, by_entailment, is_zero_shot, refuse_fields
from service.schemas import ClassifyRequest
from service.web.call import Answer, Call, CurrentCall

# A response repeats the labels for each input: a request of 2 MB could have a response of 250 MB.
_MAX_ANSWER_CHARACTERS = 2**24


async def classify(call: CurrentCall) -> Answer:
    """Score the labels of the request, or the labels of the server, for each input."""
    return await scored(call, await call.read(ClassifyRequest))


async def scored(call: Call, body: ClassifyRequest, *, alone: bool = False) -> Answer:
    """Answer with the labels of each input, best first. alone: answer with the labels of the first input."""

    async def compute(source: Source) -> Answer:
        if call.engine.checkpoint.task == "label-logits":
            found = await _by_tokens(call, body, source)
        else:
            found = await _by_output(call, body, source)
        rows = map(partial(_best_first, found.labels), found.logits, found.scores)
        return answer(next(rows) if alone else await json_list(rows), found.result, call, source)

    if body.labels is not None and is_zero_shot(call.engine, body):
        refuse_fields(body)
    return await answered(call, body, compute)


async def _by_output(call: Call, body: ClassifyRequest, source: Source) -> Scores:
    """Score classes, or labels that are compared by embedding or by entailment."""
    settings, decisions = call.state.settings, call.engine.decisions
    if body.template is not None:
        raise InvalidInput(
            "template is accepted only by a server with --task label-logits, which scores labels by tokens",
            field="template",
        )
    if body.labels is not None and is_zero_shot(call.engine, body):
        _check_labels(body.labels, source.count, settings.max_request_inputs)
        return await by_entailment(call, body, source)
    _refuse_zero_shot(body)
    salt = call.salt(body.cache_salt)
    known = decisions.labels
    if known is None:
        if body.labels is None:
            raise NoClassifier("the server has no classifier; give labels to choose from", field="labels")
        labels = body.labels
        _check_labels(labels, source.count, settings.max_request_inputs)
        embeddings = await _label_embeddings(call, labels, call.truncates(body.truncate), salt)
        result = await computed(call, source, reads=None, salt=salt)
        similarities = cosine_matrix(normalize(result.outputs), embeddings)
        scores = class_scores(similarities, body.temperature or SIMILARITY_TEMPERATURE)
        return Scores(labels, similarities, scores, result)
    columns = _columns(body.labels, known)
    # The budget of a database was measured for all classes of the server, and not for other ones.
    is_whole = body.labels is None or len(columns) == len(known)
    reads = Measure.AGREEMENT if is_whole else None
    result = await computed(call, source, reads=reads, salt=salt)
    logits = decisions.class_logits(result.outputs)[:, columns]
    temperature = (body.temperature or decisions.temperature) / decisions.temperature
    scores = class_scores(logits, temperature, decisions.multi_label)
    return Scores([known[column] for column in columns], logits, scores, result)


def _refuse_zero_shot(body: ClassifyRequest) -> None:
    """Raise InvalidInput for fields that only zero-shot classification has."""
    for field in ("hypothesis_template", "multi_label"):
        if getattr(body, field):
            raise InvalidInput(
                f"{field} is accepted only with labels, and by a model of natural language inference, which "
                "has a class named entailment",
                field=field,
            )


async def _by_tokens(call: Call, body: ClassifyRequest, source: Source) -> Scores:
    """Score labels by the logits of their tokens after the template."""
    _refuse_zero_shot(body)
    if body.labels is not None:
        _check_labels(body.labels, source.count, call.state.settings.max_request_inputs)
    template = None if body.template is None else Template.parse(body.template, pairs=False)
    # In a thread, because the template may be long and the labels many.
    labels = await asyncio.to_thread(call.engine.decisions.labels_in, template, body.labels)
    logits, result = await label_logits(call, source, labels, salt=call.salt(body.cache_salt))
    return Scores(list(labels.labels), logits, class_scores(logits, body.temperature or 1.0), result)


def _columns(requested: list[str] | None, known: tuple[str, ...]) -> list[int]:
    """Return the columns of the requested labels, or of all. Raises InvalidInput for another label."""
    if requested is None:
        return list(range(len(known)))
    require_distinct(requested)
    columns = {label: column for column, label in enumerate(known)}
    for index, label in enumerate(requested):
        is_shared = len(columns) < len(known) and known.count(label) > 1
        if label not in columns or is_shared:
            field = f"labels[{index}]"
            what = "the name of several classes" if is_shared else "not a label of the classifier"
            raise InvalidInput(f"{field} is {what}; /info lists the labels", field=field)
    return [columns[label] for label in requested]


def _check_labels(labels: list[str], inputs: int, limit: int) -> None:
    """Raise TooManyInputs if the labels are too many or too long, InvalidInput if a label is repeated."""
    check_count(labels, "labels", limit)
    require_distinct(labels)
    characters = inputs * sum(map(len, labels))
    if characters > _MAX_ANSWER_CHARACTERS:
        raise TooManyInputs(
            f"the response repeats the labels for each input and would have {characters} characters of "
            f"labels; at most {_MAX_ANSWER_CHARACTERS} are allowed; give fewer inputs or shorter labels",
            field="labels",
        )


async def _label_embeddings(call: Call, labels: list[str], truncate: bool, salt: bytes) -> np.ndarray:
    """Return the labels' embeddings, [labels, dimensions], of unit length.

    Computes only labels that are not cached for this salt, or all without reuse. Errors name the label.
    """
    memory = call.serving().label_memory
    known = memory.recall(labels, truncate, salt) if call.reuse else {}
    missing = [label for label in labels if label not in known]
    if missing:
        # Labels are not inputs, so neither the response header nor the metric of outcomes counts them.
        with named("labels", lambda index: f"labels[{labels.index(missing[index])}]"):
            result = await computed(call, Texts(missing, truncate), reuse=False, counted=False)
        embeddings = normalize(result.outputs)
        memory.remember(missing, truncate, embeddings, salt)
        known.update(zip(missing, embeddings, strict=True))
    return np.stack([known[label] for label in labels])


def _best_first(labels: list[str], logits: np.ndarray, scores: np.ndarray) -> list[dict[str, Any]]:
    values = scores.tolist()
    return [{"label": labels[column], "score": values[column]} for column in best_first(logits)]
