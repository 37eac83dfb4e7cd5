"""What a request's body may hold and what an answer looks like.

Strict: a number is no string, a field that is not known is refused. The texts of errors are fixed
sentences; what the client sent is never repeated.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

# The type of errors whose message is already a sentence for the client.
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
# fail_fast: a list of a million numbers is refused at its first one.
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Inputs = Annotated[Texts, BeforeValidator(_as_list, json_schema_input_type=str | list[str])]
Truncate = Annotated[
    bool | None,
    Field(
        description="Cut a text that is too long (true) or refuse it (false); null is the server's default."
    ),
]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    inputs: Inputs = Field(description="One text or several.")
    truncate: Truncate = None


class EmbedRequest(_Request):
    """Texts to embed."""

    normalize: bool = Field(True, description="Bring every embedding to unit length.")
    prompt_name: Text | None = Field(
        None, description="One of the model's prompts (/info lists them), instead of its default one."
    )


class ClassifyRequest(_Request):
    """Texts to classify, among the labels given or among those of the server."""

    labels: Texts | None = Field(
        None,
        description="Labels to choose from. A server with labels of its own needs none. These restrict a "
        "classifier's, and stand in the place of those that a decoder scores by their tokens.",
    )
    template: Text | None = Field(
        None,
        description="Holds {} once, where each input goes, and ends where the label follows; instead of the "
        "server's own. For decoders that score labels by their tokens.",
    )
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Of the softmax or sigmoid; 1.0 for labels with logits, 0.05 for labels compared by "
        "embedding.",
    )


class LabelScore(BaseModel):
    """A label and its probability."""

    label: str
    score: float


class ErrorDetail(BaseModel):
    """What went wrong, for programs (`code`) and for people (`message`)."""

    code: str = Field(examples=["invalid_input"])
    message: str = Field(examples=["inputs[3] must not be empty"])
    field: str | None = Field(examples=["inputs[3]"])


class ErrorBody(BaseModel):
    """The one shape of every answer that is not a success."""

    error: ErrorDetail
