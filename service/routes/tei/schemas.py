"""What the routes of text-embeddings-inference share: JSON schemas, and the documentation of errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from attncache_core.checkpoints.template import Text as TextOrPair
from service.routes.inference_route import ERRORS, Api
from service.schemas import (
    REFUSED,
    Body,
    Inputs,
    Text,
    Texts,
    TextsOrIds,
    TokenIdLists,
    TokenIds,
    Truncate,
    TruncationDirection,
    as_lists_of_ids,
    checked_text,
)

PromptName = Annotated[
    Text | None,
    Field(
        description="Name of one of the model's prompts; /info lists the names. Default: the model's default "
        "prompt."
    ),
]


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
        return Predicted([_text_or_pair(each, f"[{index}]") for index, each in enumerate(inputs)], True)
    return Predicted([_text_or_pair(inputs, "")], False)


def _text_or_pair(texts: Any, where: str) -> TextOrPair:
    if not isinstance(texts, list) or len(texts) not in (1, 2):
        raise _not_predictable(where)
    if not all(isinstance(text, str) for text in texts):
        raise _not_predictable(where)
    for text in texts:
        checked_text(text)
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _not_predictable(where: str) -> PydanticCustomError:
    return PydanticCustomError(
        REFUSED,
        "must be a text, a pair [text, text], or a list of [text] and [text, text]{where}",
        {"where": f"; element {where} is neither" if where else ""},
    )


class _Request(Body):
    """What the bodies of several routes hold."""

    truncate: Truncate = None
    truncation_direction: TruncationDirection = None


class EmbedAllRequest(_Request):
    """The body of POST /embed_all."""

    inputs: TextsOrIds = Field(
        description="One text or a list of texts, or the token ids of one text or several."
    )
    prompt_name: PromptName = None


class PredictParameters(Body):
    """The parameters that clients of the Hugging Face Hub send to classify texts."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="What makes scores of logits. Default: what the model was trained with."
    )
    top_k: Annotated[int, Field(gt=0)] | None = Field(
        None, description="Return this many of the best labels. Default: all."
    )


class PredictRequest(_Request):
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


class SimilarityInputs(Body):
    """The texts that are compared."""

    source_sentence: Text = Field(description="The text that all sentences are compared with.")
    sentences: Texts


class SimilarityParameters(_Request):
    """How the texts are embedded."""

    prompt_name: PromptName = None


class SimilarityRequest(Body):
    """The body of POST /similarity."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class TokenizeRequest(Body):
    """The body of POST /tokenize."""

    inputs: Inputs = Field(description="One text or a list of texts.")
    add_special_tokens: bool = Field(
        True, description="Add the special tokens that open and close a sequence."
    )
    prompt_name: PromptName = None


class DecodeRequest(Body):
    """The body of POST /decode."""

    ids: Annotated[
        TokenIdLists,
        BeforeValidator(as_lists_of_ids, json_schema_input_type=TokenIds | TokenIdLists),
    ] = Field(description="The token ids of one text, or of several.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")


class SimpleToken(BaseModel):
    """A token of a text."""

    id: int
    text: str
    special: bool
    start: int | None  # index of the first character; null for a special token
    stop: int | None  # index behind the last character; null for a special token


class TeiErrorBody(BaseModel):
    """The body of every error response of these routes."""

    error: str = Field(examples=["inputs[3] must not be empty"])
    error_type: Literal["Validation", "Overloaded", "Backend", "Unhealthy"]


TEI = Api(
    "text-embeddings-inference",
    {status: {**documented, "model": TeiErrorBody} for status, documented in ERRORS.items() if status != 404},
)
