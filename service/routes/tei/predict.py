"""POST /predict: texts, or pairs of texts, to the server's labels with scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from attncache_core import InvalidInput
from attncache_core.checkpoints.template import Text as TextOrPair
from service.batching.sources import Texts
from service.routes.classify import Classified, best_first, classified
from service.routes.common import answer, check_count, json_list
from service.routes.tei.schemas import CutRequest
from service.schemas import REFUSED, Body, Text, checked_text
from service.web.call import Answer, CurrentCall

# They name the place of a text that is not accepted.
_TEXTS: TypeAdapter[list[str]] = TypeAdapter(list[Text])
_LISTS: TypeAdapter[list[list[str]]] = TypeAdapter(Annotated[list[list[Text]], Field(fail_fast=True)])


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
    source = Texts(body.inputs.texts, call.truncates(body.truncate), body.truncation_direction or "right")
    found = await classified(call, source, salt=call.salt())
    maximum = body.parameters.top_k if body.parameters else None
    scored = zip(found.logits, _scores(found, body).tolist(), strict=True)
    rows = (
        [{"score": scores[column], "label": found.labels[column]} for column in best_first(logits)[:maximum]]
        for logits, scores in scored
    )
    is_list = body.inputs.is_list or body.parameters is not None
    return answer(await json_list(rows) if is_list else next(rows), found.result, call)


def _scores(found: Classified, body: PredictRequest) -> np.ndarray:
    """Return scores, float32 [texts, labels], as the request asks for."""
    function = body.parameters.function_to_apply if body.parameters else None
    if body.raw_scores or function == "none":
        return found.logits
    return found.scores(None if function is None else function == "sigmoid")
