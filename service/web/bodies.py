"""Read and check a request's body, or raise an error that says what to correct and repeats no input.

    receive -> at most max_body_bytes -> JSON, UTF-8 -> schema

FastAPI's own validation is not used: it reads a body of any size, and its errors quote what the client sent.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from attncache_core import InvalidInput
from service.errors import BodyTooLarge, ClientGone, MalformedBody
from service.schemas import REFUSED

REUSE_HEADER = "X-AttnCache-Reuse"
REQUIRE_MODEL_HEADER = "X-AttnCache-Require-Model"

# pydantic's error type -> what is required of the field.
_SENTENCES = {
    "missing": "is required",
    "string_type": "must be a string",
    "list_type": "must be a list of strings",
    "too_short": "must not be empty",
    "string_too_long": "must have at most 256 characters",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "greater_than": "must be greater than 0",
    "finite_number": "must be a finite number",
}

# Describing the errors of 100,000 unknown fields would block the event loop for a third of a second.
_NAMEABLE_ERRORS = 100

Schema = TypeVar("Schema", bound=BaseModel)


async def read_body(request: Request, schema: type[Schema], max_bytes: int) -> Schema:
    """Read and check a request's body.

    Raises BodyTooLarge, MalformedBody, InvalidInput or ClientGone.
    """
    content = await _read_bytes(request, max_bytes)
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        # Not chained, because pydantic's message quotes the input.
        raise _translated(error, schema) from None


def reuse_wanted(request: Request) -> bool:
    """Return whether the header X-AttnCache-Reuse is on, as it is by default. Raises InvalidInput."""
    value = request.headers.get(REUSE_HEADER, "on").strip().lower()
    if value not in ("on", "off"):
        raise InvalidInput(f"{REUSE_HEADER} must be on or off", field=REUSE_HEADER)
    return value == "on"


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    # The header only refuses early: the bytes that arrive are counted too. 20 digits exceed any limit.
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left before its body was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body must have at most {max_bytes} bytes")


def _translated(error: ValidationError, schema: type[BaseModel]) -> InvalidInput:
    known = ", ".join(schema.model_fields)
    not_an_object = InvalidInput(f"the body must be a JSON object with the fields {known}")
    if error.error_count() > _NAMEABLE_ERRORS:
        return not_an_object
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, location = first["type"], first["loc"]
    if kind == "json_invalid":
        return MalformedBody("the body must be JSON in UTF-8, without lone surrogates or deep nesting")
    if kind == "extra_forbidden":
        # The client chose the field's name, so the message does not repeat the name.
        return InvalidInput(f"the body has an unknown field; the known fields are {known}")
    if not location:
        return not_an_object
    field = _field_name(location)
    sentence = first["msg"] if kind == REFUSED else _SENTENCES.get(kind, "is not accepted here")
    return InvalidInput(f"{field} {sentence}", field=field)


def _field_name(location: tuple[int | str, ...]) -> str:
    """Return ("inputs", 3) as inputs[3], without the names that pydantic adds for a branch of a union."""
    indices = "".join(f"[{part}]" for part in location[1:] if isinstance(part, int))
    return f"{location[0]}{indices}"


def body_documentation(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a route that calls `read_body`: the body and the request headers."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema.model_json_schema()}},
        },
        "parameters": [
            {
                "name": REUSE_HEADER,
                "in": "header",
                "required": False,
                "description": "off computes every text of the request in full, without reuse. Default: on.",
                "schema": {"type": "string", "enum": ["on", "off"], "default": "on"},
            },
            {
                "name": REQUIRE_MODEL_HEADER,
                "in": "header",
                "required": False,
                "description": "Fingerprint of the model that must answer, or at least its first 8 "
                "characters. Status 409 if the server serves another model.",
                "schema": {"type": "string", "pattern": "^[0-9a-fA-F]{8,64}$"},
            },
        ],
    }
