"""What the routes of text-embeddings-inference share: JSON schemas, and the documentation of errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from attncache_core.checkpoints.template import Text as TextOrPair
from service.routes.common import ERRORS
from service.schemas import (
    REFUSED,
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
from service.settings import Settings

TAG = "text-embeddings-inference"
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


class _Request(BaseModel):
    """What the bodies of several routes hold."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    truncate: Truncate = None
    truncation_direction: TruncationDirection = None


class EmbedAllRequest(_Request):
    """The body of POST /embed_all."""

    inputs: TextsOrIds = Field(
        description="One text or a list of texts, or the token ids of one text or several."
    )
    prompt_name: PromptName = None


class PredictParameters(BaseModel):
    """The parameters that clients of the Hugging Face Hub send to classify texts."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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
            json_schema_input_type=str
            | Annotated[list[str], Field(min_length=1, max_length=2)]
            | list[Annotated[list[str], Field(min_length=1, max_length=2)]],
        ),
    ] = Field(description="A text, a pair [text, text], or a list of [text] and [text, text].")
    raw_scores: bool = Field(False, description="Return logits instead of probabilities.")
    parameters: PredictParameters | None = Field(
        None,
        description="Sent by clients of the Hugging Face Hub. With it, the response to one text is a list "
        "with one element, too.",
    )


class SimilarityInputs(BaseModel):
    """The texts that are compared."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    source_sentence: Text = Field(description="The text that all sentences are compared with.")
    sentences: Texts


class SimilarityParameters(_Request):
    """How the texts are embedded."""

    prompt_name: PromptName = None


class SimilarityRequest(BaseModel):
    """The body of POST /similarity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class TokenizeRequest(BaseModel):
    """The body of POST /tokenize."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    inputs: Inputs = Field(description="One text or a list of texts.")
    add_special_tokens: bool = Field(
        True, description="Add the special tokens that open and close a sequence."
    )
    prompt_name: PromptName = None


class DecodeRequest(BaseModel):
    """The body of POST /decode."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    ids: Annotated[
        TokenIdLists,
        BeforeValidator(as_lists_of_ids, json_schema_input_type=TokenIds | list[TokenIds]),
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


TEI_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**documented, "model": TeiErrorBody} for status, documented in ERRORS.items() if status != 404
}


def truncates(truncate: bool | None, settings: Settings) -> bool:
    """Return whether texts that are too long are cut. truncate: of the request; None: as the server does."""
    return settings.truncate if truncate is None else truncate
