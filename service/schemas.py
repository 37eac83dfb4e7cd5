"""The JSON schemas of requests and responses.

Validation is strict: a number is not accepted as a string, and an unknown field is refused. Error messages
are fixed sentences that never repeat what the client sent.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

# The type of the pydantic errors that have a message for the client.
REFUSED = "refused"


def _checked(text: str) -> str:
    if not text:
        raise PydanticCustomError(REFUSED, "must not be empty")
    if "\0" in text:
        raise PydanticCustomError(REFUSED, "must not hold null bytes")
    return text


def _as_list(inputs: Any) -> list[Any]:
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, list):
        return inputs
    raise PydanticCustomError(REFUSED, "must be a string or a list of strings")


Text = Annotated[str, AfterValidator(_checked)]
# fail_fast refuses a list of a million numbers at the first number.
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Inputs = Annotated[Texts, BeforeValidator(_as_list, json_schema_input_type=str | list[str])]
Truncate = Annotated[
    bool | None,
    Field(
        description="true cuts a text that is too long, false refuses the text. Default (null): the server's "
        "setting."
    ),
]


# Salts and session ids are compared and kept, so they are short.
Name = Annotated[Text, Field(max_length=256)]


class InferenceRequest(BaseModel):
    """The fields that the bodies of all inference requests have: `inputs`, or a turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    inputs: Inputs | None = Field(
        None, description="One text or a list of texts. Required, unless session_id is given."
    )
    truncate: Truncate = None
    session_id: Name | None = Field(
        None,
        description="Id of a conversation that the server keeps, chosen by the client. Give append or "
        "transcript with it, and no inputs.",
    )
    append: Text | None = Field(
        None,
        description="One new turn of the session. Status 404 if the server has no history of the session.",
    )
    transcript: Inputs | None = Field(
        None,
        description="All turns of the session. The server computes only what differs from the turns that it "
        "knows. A string is one turn.",
    )
    cache_salt: Name | None = Field(
        None,
        description="Requests with different salts share no stored keys and values and no sessions. "
        "Default: requests without a salt share theirs.",
    )


class EmbedRequest(InferenceRequest):
    """The body of POST /embed."""

    normalize: bool | None = Field(
        None,
        description="Scale every embedding to unit length. Default: as the model's folder says; if the "
        "folder says nothing, embeddings get unit length.",
    )
    prompt_name: Text | None = Field(
        None,
        description="Name of one of the model's prompts; /info lists the names. Default: the model's default "
        "prompt.",
    )


class ClassifyRequest(InferenceRequest):
    """The body of POST /classify."""

    labels: Texts | None = Field(
        None,
        description="Labels to choose from. Required if the server has no labels. For a classifier, the "
        "labels must be some of the classifier's labels, and only these labels are scored. For a decoder "
        "that scores labels by their tokens, the labels replace the server's labels.",
    )
    template: Text | None = Field(
        None,
        description="Template for decoders that score labels by their tokens. Holds {} once, where each "
        "input is inserted, and ends where the label follows. Default: the server's template.",
    )
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Temperature of the softmax or sigmoid. Default: 1.0 for labels with logits, 0.05 for "
        "labels that are compared by embedding.",
    )


class LabelScore(BaseModel):
    """A label and its probability."""

    label: str
    score: float


class ErrorDetail(BaseModel):
    """The error, for programs (`code`) and for people (`message`)."""

    code: str = Field(examples=["invalid_input"])
    message: str = Field(examples=["inputs[3] must not be empty"])
    field: str | None = Field(examples=["inputs[3]"])


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail
