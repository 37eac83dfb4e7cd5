"""What the routes under /v1 share: JSON schemas, the documentation of errors, and the usage."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from attncache_core import PrefillResult
from service.routes.inference_route import ERRORS, Api
from service.schemas import Body, Dimensions, Name, TextsOrIds
from service.settings import Settings

ModelName = Annotated[
    Name | None,
    Field(description="Name of the model, as in /v1/models. Status 404 for others. Default: any."),
]
User = Annotated[str | None, Field(description="Accepted, because clients send it. Changes nothing.")]
Salt = Annotated[
    Name | None,
    Field(
        description="Requests with different salts share no stored keys and values. Default: those without "
        "a salt share theirs."
    ),
]


class EmbeddingsRequest(Body):
    """The body of POST /v1/embeddings."""

    input: TextsOrIds = Field(
        description="One text or a list of texts, or the token ids of one text or several, computed as they "
        "are."
    )
    model: ModelName = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the bytes of little-endian float32 numbers. Default: float."
    )
    dimensions: Dimensions = None
    user: User = None
    cache_salt: Salt = None


class SegmentTokens(BaseModel):
    """What was done with one chunk."""

    tokens: int
    cached: int  # tokens whose keys and values were stored
    recomputed: int  # tokens that were computed again


class PromptTokensDetails(BaseModel):
    """What was not computed of the prompt."""

    cached_tokens: int  # whose keys and values were stored
    segments: list[SegmentTokens] | None = None  # of a prompt whose chunks were blended, in order


class Usage(BaseModel):
    """The tokens of a request, as the model's tokenizer makes them."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None  # absent with --no-reuse-headers


class Embedding(BaseModel):
    """One embedding."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # numbers, or base64


class Embeddings(BaseModel):
    """The response of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """A model that the server serves."""

    id: str
    object: Literal["model"]
    created: int  # Unix time at which the server started
    owned_by: str
    max_model_len: int  # most tokens of a text


class Models(BaseModel):
    """The response of GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


class OpenAIError(BaseModel):
    """The error, for programs (`type` and `code`) and for people (`message`)."""

    message: str = Field(examples=["input[3] must not be empty"])
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(examples=["input[3]"])
    code: str = Field(examples=["invalid_input"])


class OpenAIErrorBody(BaseModel):
    """The body of every error response under /v1."""

    error: OpenAIError


class RerankErrorBody(OpenAIErrorBody):
    """The body of every error response of the routes for reranking under /v1 and /v2."""

    detail: str = Field(description="The message, for clients of Jina.", examples=["query is required"])


def _documented(body: type[OpenAIErrorBody]) -> Api:
    return Api(
        "OpenAI",
        {status: {**documented, "model": body} for status, documented in ERRORS.items()}
        | {404: {"model": body, "description": "The server does not serve the model."}},
    )


OPENAI = _documented(OpenAIErrorBody)
RERANK = _documented(RerankErrorBody)


def usage_of(result: PrefillResult, settings: Settings) -> dict[str, Any]:
    """Return the Usage of a request. With --no-reuse-headers, what was reused is left out."""
    usage = {"prompt_tokens": result.all_asked_tokens, "total_tokens": result.all_asked_tokens}
    if not settings.reuse_headers:
        return usage
    details: dict[str, Any] = {"cached_tokens": result.all_cached_tokens}
    if result.blended:
        details["segments"] = [chunk._asdict() for report in result.blended for chunk in report.chunks]
    return {**usage, "prompt_tokens_details": details}
