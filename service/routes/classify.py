"""POST /classify: texts to labels with scores; and what other routes share that score labels.

the model has classes       outputs -> class logits (-> requested labels) -> softmax, or sigmoid (multi-label)
the task is label-logits    outputs -> logits of the labels' tokens -> softmax
the request has labels      outputs . label embeddings, both of unit length -> softmax
the model is one of NLI     (input, label) -> the pair (input, hypothesis about the label)
                            -> logits of entailment -> softmax, or sigmoid (multi-label)

Models of natural language inference (NLI) score any labels, also without training for them: zero-shot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from attncache_core import (
    InputTooLong,
    InvalidInput,
    NoClassifier,
    NotFinite,
    PrefillEngine,
    PrefillResult,
    class_scores,
    normalize,
)
from attncache_core.checkpoints.template import Template
from attncache_core.heads.classifier import SIMILARITY_TEMPERATURE
from attncache_core.heads.comparator import Measure
from attncache_core.heads.vectors import cosine_matrix, require_finite
from attncache_core.heads.zero_shot import HYPOTHESIS_TEMPLATE, entailment_class
from attncache_core.text.labels import LabelTokens
from attncache_core.text.limits import require_distinct
from service.batching.segments import DividedTexts
from service.batching.sources import Source, Texts
from service.errors import TooManyInputs, rename
from service.routes.common import answer, check_count, computed, json_list, named, text_index
from service.routes.inputs import answered
from service.schemas import ClassifyRequest
from service.web.call import Answer, Call, CurrentCall

# A response repeats the labels for each input: a request of 2 MB could have a response of 250 MB.
_MAX_ANSWER_CHARACTERS = 2**24
# The fewest bytes that a label with its score takes in an answer, beside the name of the label.
_SCORE_BYTES = len('{"label":"","score":0.0},')


class Classified(NamedTuple):
    """The logits of labels for some texts."""

    labels: Sequence[str]
    logits: np.ndarray  # float32 [texts, labels], in the order of the scores
    result: PrefillResult
    multi_label: bool = False  # whether each label is decided by itself
    temperature: float = 1.0

    def scores(self, multi_label: bool | None = None) -> np.ndarray:
        """Return the scores, float32 [texts, labels]. multi_label: None: as the model says."""
        by_itself = self.multi_label if multi_label is None else multi_label
        return class_scores(self.logits, self.temperature, by_itself)


async def classify(call: CurrentCall) -> Answer:
    """Score the labels of the request, or the labels of the server, for each input."""
    return await scored(call, await call.read(ClassifyRequest))


async def scored(call: Call, body: ClassifyRequest, *, alone: bool = False) -> Answer:
    """Answer with the labels of each input, best first. alone: answer with the labels of the first input."""

    async def compute(source: Source) -> Answer:
        if call.engine.checkpoint.task == "label-logits":
            found = await _by_requested_tokens(call, body, source)
        else:
            found = await _by_output(call, body, source)
        rows = map(partial(_best_first, found.labels), found.logits, found.scores())
        return answer(next(rows) if alone else await json_list(rows, call), found.result, call, source)

    if _is_zero_shot(call.engine, body):
        _refuse_fields(body)
    return await answered(call, body, compute)


async def _by_output(call: Call, body: ClassifyRequest, source: Source) -> Classified:
    """Score classes, or labels that are compared by embedding or by entailment."""
    decisions = call.engine.decisions
    if body.template is not None:
        raise InvalidInput(
            "template is accepted only by a server with --task label-logits, which scores labels by tokens",
            field="template",
        )
    if body.labels is not None and _is_zero_shot(call.engine, body):
        _check_labels(call, body.labels, source.count)
        return await _by_entailment(call, body, body.labels, source)
    _refuse_zero_shot(body, decisions.multi_label)
    salt = call.salt(body.cache_salt)
    known = decisions.labels
    if known is None:
        if body.labels is None:
            raise NoClassifier("the server has no classifier; give labels to choose from", field="labels")
        labels = body.labels
        _check_labels(call, labels, source.count)
        embeddings = await _label_embeddings(call, labels, call.truncates(body.truncate), salt)
        result = await computed(call, source, reads=None, salt=salt)
        _count_scores(call, labels, len(result))
        similarities = cosine_matrix(normalize(result.outputs), embeddings)
        temperature = body.temperature or SIMILARITY_TEMPERATURE
        return Classified(labels, similarities, result, temperature=temperature)
    columns = _columns(body.labels, known)
    # The budget of a database was measured for all classes of the server, and not for other ones.
    is_whole = body.labels is None or len(columns) == len(known)
    reads = Measure.AGREEMENT if is_whole else None
    result = await computed(call, source, reads=reads, salt=salt)
    labels = [known[column] for column in columns]
    _count_scores(call, labels, len(result))
    logits = decisions.class_logits(result.outputs)[:, columns]
    temperature = (body.temperature or decisions.temperature) / decisions.temperature
    return Classified(labels, logits, result, decisions.multi_label, temperature)


def _refuse_zero_shot(body: ClassifyRequest, scores_alone: bool = False) -> None:
    """Raise InvalidInput for fields that only zero-shot classification has.

    scores_alone: whether the model scores each label by itself, which is what multi_label asks for.
    """
    if scores_alone and body.multi_label is False:
        raise InvalidInput(
            "multi_label must not be false, because the model scores each label by itself; send true, or "
            "leave it out",
            field="multi_label",
        )
    of_zero_shot = (
        ("hypothesis_template", body.hypothesis_template),
        ("multi_label", body.multi_label and not scores_alone),
    )
    for field, value in of_zero_shot:
        if value:
            raise InvalidInput(
                f"{field} is accepted only with labels, and by a model of natural language inference, which "
                "has a class named entailment",
                field=field,
            )


async def _by_requested_tokens(call: Call, body: ClassifyRequest, source: Source) -> Classified:
    """Score labels by the logits of their tokens after the template."""
    _refuse_zero_shot(body)
    if body.labels is not None:
        _check_labels(call, body.labels, source.count)
    template = None if body.template is None else Template.parse(body.template, pairs=False)
    # In a thread, because the template may be long and the labels many.
    labels = await asyncio.to_thread(call.engine.decisions.labels_in, template, body.labels)
    found = await by_tokens(call, source, labels, salt=call.salt(body.cache_salt))
    return found._replace(temperature=body.temperature or 1.0)


async def by_tokens(call: Call, source: Source, labels: LabelTokens, *, salt: bytes) -> Classified:
    """Compute texts in the prompt of labels, and score the labels by the logits of their tokens.

    Raises NotFinite for the field "labels", and as `computed`.
    """
    result = await computed(call, source, prompt=labels.prompt, labels=labels, salt=salt)
    # In a thread, because many labels have many log-probabilities to add.
    logits = await asyncio.to_thread(
        call.engine.decisions.label_logits, labels, result.outputs, result.log_probabilities
    )
    # The outputs are finite, so a NaN here comes from a label's row of the language head.
    require_finite(np.isfinite(logits).T, "labels")
    return Classified(labels.labels, logits, result)


async def classified(call: Call, source: Source, *, salt: bytes) -> Classified:
    """Compute texts, or pairs, and score the server's labels.

    Raises NoClassifier if the server has no labels, and as Batcher.submit.
    """
    decisions = call.engine.decisions
    if call.engine.checkpoint.task == "label-logits":
        return await by_tokens(call, source, decisions.labels_in(), salt=salt)
    if decisions.labels is None:
        raise NoClassifier("the server has no labels of its own; use /classify, and give labels")
    result = await computed(call, source, reads=Measure.AGREEMENT, salt=salt)
    logits = decisions.class_logits(result.outputs)
    return Classified(decisions.labels, logits, result, decisions.multi_label)


def _is_zero_shot(engine: PrefillEngine, body: ClassifyRequest) -> bool:
    """Return whether a request has labels that are scored by entailment.

    They are if the model is one of NLI, unless all labels are classes of the model and the request has no
    field of zero-shot classification.
    """
    is_nli = engine.checkpoint.task == "classify" and entailment_class(engine.checkpoint.config) is not None
    if body.labels is None or not is_nli:
        return False
    asks = body.hypothesis_template is not None or body.multi_label is not None
    return asks or not set(body.labels) <= set(engine.decisions.labels or ())


def _refuse_fields(body: ClassifyRequest) -> None:
    """Raise InvalidInput for the fields that labels scored by entailment do not have."""
    for field in ("session_id", "segments", "temperature"):
        if getattr(body, field) is not None:
            raise InvalidInput(
                f"{field} is not accepted with labels that are scored by entailment", field=field
            )


async def _by_entailment(
    call: Call, body: ClassifyRequest, labels: Sequence[str], source: Source
) -> Classified:
    """Score each label for each input. Raises TooManyInputs, and as submit."""
    if isinstance(source, DividedTexts):
        source = source.texts  # only the input of a pair could be divided
    assert isinstance(source, Texts)
    decisions, maximum = call.engine.decisions, call.state.settings.max_queue_sequences
    zero_shot = decisions.zero_shot(labels, body.hypothesis_template or HYPOTHESIS_TEMPLATE)
    pair_count = source.count * len(labels)
    if pair_count > maximum:
        raise TooManyInputs(
            f"inputs make {pair_count} pairs with these labels, and at most {maximum} may wait",
            field="labels" if len(labels) > maximum else "inputs",
        )
    texts = [text for text in source.texts if isinstance(text, str)]
    pairs = Texts(zero_shot.pairs(texts), source.truncate, source.cut)
    with _naming_pairs(len(labels)):
        result = await computed(call, pairs, prompt=zero_shot.prompt, salt=call.salt(body.cache_salt))
    multi_label = bool(body.multi_label)
    logits = zero_shot.label_logits(decisions.class_logits(result.outputs), multi_label)
    return Classified(labels, logits, result, zero_shot.is_by_itself(multi_label))


@contextmanager
def _naming_pairs(labels: int) -> Iterator[None]:
    """Let errors about a pair name the input, or the label that leaves no room for the input."""
    try:
        yield
    except (InvalidInput, NotFinite) as error:
        if (index := text_index(error)) is not None:
            is_full = isinstance(error, InvalidInput) and not isinstance(error, InputTooLong)
            rename(error, f"labels[{index % labels}]" if is_full else f"inputs[{index // labels}]")
        raise


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


def _check_labels(call: Call, labels: list[str], inputs: int) -> None:
    """Raise TooManyInputs if the labels are too many or too long, InvalidInput if a label is repeated."""
    check_count(call, labels, "labels")
    require_distinct(labels)
    characters = inputs * sum(map(len, labels))
    if characters > _MAX_ANSWER_CHARACTERS:
        raise TooManyInputs(
            f"the response repeats the labels for each input and would have {characters} characters of "
            f"labels; at most {_MAX_ANSWER_CHARACTERS} are allowed; give fewer inputs or shorter labels",
            field="labels",
        )


def _count_scores(call: Call, labels: Sequence[str], inputs: int) -> None:
    """Count the answer before its scores are computed, because others wait meanwhile. Raises QueueFull."""
    call.count_answer(inputs * sum(_SCORE_BYTES + len(label) for label in labels))


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


def best_first(logits: np.ndarray) -> list[int]:
    """Return the indices of logits [n], the largest first: the scores of large logits may all be 1."""
    order: list[int] = np.argsort(-logits, kind="stable").tolist()
    return order


def _best_first(labels: Sequence[str], logits: np.ndarray, scores: np.ndarray) -> list[dict[str, Any]]:
    values = scores.tolist()
    return [{"label": labels[column], "score": values[column]} for column in best_first(logits)]
