"""What the routes of text-embeddings-inference share: fields of bodies, and the documentation of errors."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from service.routes.inference_route import ERRORS, Api
from service.schemas import Body, Truncate, TruncationDirection


class CutRequest(Body):
    """What the bodies of routes hold that cut texts."""

    truncate: Truncate = None
    truncation_direction: TruncationDirection = None


class TeiErrorBody(BaseModel):
    """The body of every error response of these routes."""

    error: str = Field(examples=["inputs[3] must not be empty"])
    error_type: Literal["Validation", "Overloaded", "Backend", "Unhealthy"]


TEI = Api(
    "text-embeddings-inference",
    {status: {**documented, "model": TeiErrorBody} for status, documented in ERRORS.items() if status != 404},
)
