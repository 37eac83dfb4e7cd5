"""The JSON schemas of requests and responses, and what a client is told of a body that breaks its schema.

Validation is strict: a number is not accepted as a string, and an unknown field is refused. Error messages
are fixed sentences that never repeat what the client sent; FastAPI's own would.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from attncache_core import InvalidInput
from service.errors import MalformedBody

# The side at which a text that is too long loses tokens.
Side = Literal["left", "right"]

# The type of the pydantic errors that have a message for the client.
REFUSED = "refused"
# pydantic's error type -> what is required of the field.
_SENTENCES = {
    "missing": "is required",
    "string_type": "must be a string",
    "list_type": "must be a list of strings",
    "too_short": "must not be empty",
    "string_too_long": "must have at most 256 characters",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "model_type": "must be an object",
    "greater_than": "must be greater than 0",
    "greater_than_equal": "must be 0 or more",
    "finite_number": "must be a finite number",
}
# Describing the errors of 100,000 unknown fields would block the event loop for a third of a second.
_NAMEABLE_ERRORS = 100

# What the parser says of frequent mistakes, and of JSON that is valid by its grammar -> what is wrong.
_FAULTS_OF_JSON = {
    "control character": "a string holds a line break or another control character; escape it, as \\n",
    "EOF": "the body ends too early",
    "hex escape": "an escaped surrogate stands alone",
    "recursion limit": "values are nested too deeply",
}

Schema = TypeVar("Schema", bound=BaseModel)


def checked_text(text: str) -> str:
    """Return a text that is accepted. Raises PydanticCustomError for others."""
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


def _as_list_of_texts_or_ids(inputs: Any) -> list[Any]:
    if isinstance(inputs, str) or (isinstance(inputs, list) and inputs and _is_number(inputs[0])):
        return [inputs]
    if isinstance(inputs, list):
        return inputs
    raise PydanticCustomError(REFUSED, "must be a string, a list of strings, or lists of token ids")


def as_lists_of_ids(ids: Any) -> list[Any]:
    """Return the token ids of one text, or of several, as a list of lists."""
    if isinstance(ids, list):
        return [ids] if ids and _is_number(ids[0]) else ids
    raise PydanticCustomError(REFUSED, "must be a list of token ids, or a list of such lists")


def _kind(inputs: Any) -> str:
    return "ids" if isinstance(inputs, list) and inputs and isinstance(inputs[0], list) else "texts"


def _token_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(_is_number(number) and number >= 0 for number in ids):
        raise PydanticCustomError(REFUSED, "must be a list of token ids, which are whole numbers from 0")
    if not ids:
        raise PydanticCustomError(REFUSED, "must not be empty")
    return ids


def _side(value: Any) -> Any:
    if value in ("left", "Left", "right", "Right"):
        return value.lower()
    if value is None:
        return None
    raise PydanticCustomError(REFUSED, "must be left or right")


def _is_number(value: Any) -> bool:
    # A bool is an int for Python, and no number in JSON.
    return type(value) is int


Text = Annotated[str, AfterValidator(checked_text), WithJsonSchema({"type": "string", "minLength": 1})]
# fail_fast refuses a list of a million numbers at the first number.
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Inputs = Annotated[Texts, BeforeValidator(_as_list, json_schema_input_type=Text | Texts)]
TokenIds = Annotated[
    list[int],
    PlainValidator(
        _token_ids,
        json_schema_input_type=Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)],
    ),
]
TokenIdLists = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
# One text or several, or the token ids of one text or several.
TextsOrIds = Annotated[
    Annotated[Texts, Tag("texts")] | Annotated[TokenIdLists, Tag("ids")],
    Discriminator(_kind),
    BeforeValidator(
        _as_list_of_texts_or_ids,
        json_schema_input_type=Text | Texts | TokenIdLists | TokenIds,
    ),
]
Truncate = Annotated[
    bool | None,
    Field(
        description="true cuts a text that is too long, false refuses the text. Default (null): the server's "
        "setting."
    ),
]
TruncationDirection = Annotated[
    Side | None,
    BeforeValidator(_side, json_schema_input_type=Literal["left", "right", "Left", "Right"] | None),
    Field(description="The side at which a text that is too long is cut. Default: right."),
]
Dimensions = Annotated[
    Annotated[int, Field(gt=0)] | None,
    Field(
        description="Keep only this many numbers of each embedding, before it gets unit length. A model that "
        "lists the numbers it was trained for accepts only these. Default: all."
    ),
]

PromptName = Annotated[
    Text | None,
    Field(
        description="Name of one of the model's prompts; /info lists the names. Default: the model's default "
        "prompt."
    ),
]
# Salts and session ids are compared and kept, so they are short.
Name = Annotated[
    str,
    Field(max_length=256),
    AfterValidator(checked_text),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 256}),
]


class Body(BaseModel):
    """The body of a request, or an object in it: of exact types, and with known fields only."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class InferenceRequest(Body):
    """The fields that the bodies of all inference requests have: `inputs`, or a turn of a conversation."""

    inputs: TextsOrIds | None = Field(
        None,
        description="One text or a list of texts, or the token ids of one text or several. Required, unless "
        "session_id or segments is given.",
    )
    segments: Texts | None = Field(
        None,
        description="Chunks of one prompt, in any order, such as passages that were retrieved. Give query "
        "with them, and no inputs. Each segment is tokenised by itself, and its keys and values are reused "
        "wherever it stands.",
    )
    query: Text | None = Field(
        None, description="What stands behind the segments, in the server's template. Always computed."
    )
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
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

    dimensions: Dimensions = None
    normalize: bool | None = Field(
        None,
        description="Scale every embedding to unit length. Default: as the model's folder says; if the "
        "folder says nothing, embeddings get unit length.",
    )
    prompt_name: PromptName = None


class ClassifyRequest(InferenceRequest):
    """The body of POST /classify."""

    inputs: Inputs | None = Field(
        None, description="One text or a list of texts. Required, unless session_id or segments is given."
    )
    labels: Texts | None = Field(
        None,
        description="Labels to choose from. Required if the server has no labels. For a classifier, the "
        "labels must be some of the classifier's labels, and only these labels are scored. A model of "
        "natural language inference takes any labels. For a decoder "
        "that scores labels by their tokens, the labels replace the server's labels.",
    )
    hypothesis_template: Text | None = Field(
        None,
        description="For a model of natural language inference: says of a text that it belongs to a label, "
        "and holds {} once, where each label is inserted. Default: This example is {}.",
    )
    multi_label: bool | None = Field(
        None,
        description="For a model of natural language inference: true scores each label by itself. Default: "
        "the scores of a text sum to 1.",
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


def checked(content: bytes, schema: type[Schema]) -> Schema:
    """Return a request's body as checked by a schema. Raises MalformedBody and InvalidInput."""
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        # Not chained, because pydantic's message quotes the input.
        raise _translated(error, schema, content) from None


def _where(error: ErrorDetails) -> str:
    """Return what a JSON parser says of the place where the JSON ends to be valid, without any input."""
    message = error.get("ctx", {}).get("error", "")
    place = re.search(r"line (\d+) column (\d+)$", message)
    if place is None:
        return ""
    reason = next((known for known in _FAULTS_OF_JSON if known in message), None)
    why = f": {_FAULTS_OF_JSON[reason]}" if reason else ""
    line, column = int(place[1]), int(place[2])
    # A line break in a string is, for the parser, where the next line begins.
    where = f"line {line}, column {column}" if column else f"the end of line {line - 1}"
    return f"; it is not valid at {where}{why}"


def _translated(error: ValidationError, schema: type[BaseModel], content: bytes) -> InvalidInput:
    an_object = f"a JSON object with the fields {', '.join(schema.model_fields)}"
    not_an_object = InvalidInput(f"the body must be {an_object}")
    if error.error_count() > _NAMEABLE_ERRORS:
        return not_an_object
    first = error.errors(include_url=False, include_input=False)[0]
    kind, location = first["type"], first["loc"]
    if kind == "json_invalid":
        if not content.strip():
            return MalformedBody(f"the body is empty; send {an_object}")
        return MalformedBody(f"the body must be JSON in UTF-8{_where(first)}")
    if not location:
        return not_an_object
    field, inner = _field_name(location, schema)
    if kind == "extra_forbidden":
        # The client chose the field's name, so the message does not repeat the name.
        whole = "the body" if inner is schema else field
        known = ", ".join(inner.model_fields)
        return InvalidInput(
            f"{whole} has an unknown field; the known fields are {known}",
            field=None if inner is schema else field,
        )
    if kind == "literal_error":
        sentence = f"must be {first['ctx']['expected']}"
    else:
        sentence = first["msg"] if kind == REFUSED else _SENTENCES.get(kind, "is not accepted here")
    return InvalidInput(f"{field} {sentence}", field=field)


def _field_name(location: tuple[int | str, ...], schema: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """Return ("inputs", "sentences", 3) as inputs.sentences[3], and the innermost schema on this way.

    Names that pydantic adds for a branch of a union, and names of unknown fields, are left out.
    """
    name, inner = "", schema
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part in inner.model_fields:
            name += f".{part}" if name else part
            inner = _model_of(inner.model_fields[part].annotation) or inner
    return name, inner


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the schema of an object that a field holds; None if the field holds no object."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_of, get_args(annotation))), None)
