"""Check a request's body, or raise an error that says what to correct and repeats no input.

    bytes -> JSON, UTF-8 -> schema

FastAPI's own validation is not used: it reads a body of any size, and its errors quote what the client sent.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from attncache_core import InvalidInput
from service.errors import BodyTooLarge, MalformedBody
from service.schemas import REFUSED

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
    "finite_number": "must be a finite number",
}

# Describing the errors of 100,000 unknown fields would block the event loop for a third of a second.
_NAMEABLE_ERRORS = 100

# What the parser says of JSON that is valid by its grammar, and what is wrong with it.
_LIMITS_OF_JSON = {
    "hex escape": "an escaped surrogate stands alone",
    "recursion limit": "values are nested too deeply",
}

Schema = TypeVar("Schema", bound=BaseModel)


def checked(content: bytes, schema: type[Schema]) -> Schema:
    """Return a request's body as checked by a schema. Raises MalformedBody and InvalidInput."""
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        # Not chained, because pydantic's message quotes the input.
        raise _translated(error, schema, content) from None


def require_small(size: int, most: int) -> None:
    """Raise BodyTooLarge if a body has more than `most` bytes."""
    if size > most:
        raise BodyTooLarge(f"the body must have at most {most} bytes; send fewer texts per request")


def _where(error: ErrorDetails) -> str:
    """Return what a JSON parser says of the place where the JSON ends to be valid, without any input."""
    message = error.get("ctx", {}).get("error", "")
    place = re.search(r"line (\d+) column (\d+)$", message)
    if place is None:
        return ""
    reason = next((known for known in _LIMITS_OF_JSON if known in message), None)
    why = f": {_LIMITS_OF_JSON[reason]}" if reason else ""
    return f"; it is not valid at line {place[1]}, column {place[2]}{why}"


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
