"""Zero-shot classification: a model of natural language inference (NLI) scores labels it was not trained for.

(input, label) -> the pair (input, hypothesis about the label) -> probability of entailment
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from attncache_core import InputTooLong, InvalidInput, NotFinite, PrefillEngine, PrefillResult
from attncache_core.heads.zero_shot import HYPOTHESIS_TEMPLATE, entailment_class
from service.batching.segments import DividedTexts
from service.batching.sources import Source, Texts
from service.errors import TooManyInputs, rename
from service.routes.common import computed, text_index
from service.schemas import ClassifyRequest
from service.web.call import Call


class Scores(NamedTuple):
    """The scores of labels for some inputs."""

    labels: list[str]
    logits: np.ndarray  # float32 [inputs, labels], in the order of the scores
    scores: np.ndarray  # float32 [inputs, labels]
    result: PrefillResult


def is_zero_shot(engine: PrefillEngine, body: ClassifyRequest) -> bool:
    """Return whether the labels of a request are scored by entailment.

    They are if the model is one of NLI, unless all labels are classes of the model and the request has no
    field of zero-shot classification.
    """
    if engine.checkpoint.task != "classify" or entailment_class(engine.checkpoint.config) is None:
        return False
    asks = body.hypothesis_template is not None or body.multi_label is not None
    return asks or not set(body.labels or ()) <= set(engine.decisions.labels or ())


def refuse_fields(body: ClassifyRequest) -> None:
    """Raise InvalidInput for the fields that labels scored by entailment do not have."""
    for field in ("session_id", "segments", "temperature"):
        if getattr(body, field) is not None:
            raise InvalidInput(
                f"{field} is not accepted with labels that are scored by entailment", field=field
            )


async def by_entailment(call: Call, body: ClassifyRequest, source: Source) -> Scores:
    """Score each label of the request for each input. Raises TooManyInputs, and as submit."""
    if isinstance(source, DividedTexts):
        source = source.texts  # only the input of a pair could be divided
    assert isinstance(source, Texts)
    decisions = call.engine.decisions
    zero_shot = decisions.zero_shot(body.labels or [], body.hypothesis_template or HYPOTHESIS_TEMPLATE)
    labels, maximum = len(zero_shot.labels), call.state.settings.max_queue_sequences
    if source.count * labels > maximum:
        raise TooManyInputs(
            f"inputs make {source.count * labels} pairs with these labels, and at most {maximum} may wait",
            field="labels" if labels > maximum else "inputs",
        )
    pairs = Texts(zero_shot.pairs(_plain(source)), source.truncate, source.cut)
    with _names(labels):
        result = await computed(call, pairs, prompt=zero_shot.prompt, salt=call.salt(body.cache_salt))
    logits = decisions.class_logits(result.outputs)
    of_labels, scores = (
        function(logits, bool(body.multi_label)) for function in (zero_shot.label_logits, zero_shot.scores)
    )
    return Scores(list(zero_shot.labels), of_labels, scores, result)


@contextmanager
def _names(labels: int) -> Iterator[None]:
    """Let errors about a pair name the input, or the label that leaves no room for the input."""
    try:
        yield
    except (InvalidInput, NotFinite) as error:
        if (index := text_index(error)) is not None:
            is_full = isinstance(error, InvalidInput) and not isinstance(error, InputTooLong)
            rename(error, f"labels[{index % labels}]" if is_full else f"inputs[{index // labels}]")
        raise


def _plain(source: Texts) -> list[str]:
    return [text for text in source.texts if isinstance(text, str)]
