"""The routes under /v1: embeddings, classes and models, in the shapes of OpenAI's and vLLM's clients.

rerank.py has the routes for reranking, which share the errors, the names of models and the usage.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from attncache_core import InvalidInput, PrefillEngine, PrefillResult
from service.batching.sources import Source, Texts, TokenSequences, bare_prompt, prompt_of, source_of
from service.errors import NotFound, UnknownModel
from service.routes.classify import classified
from service.routes.common import answer, check_count, computed, json_list, json_response, named
from service.routes.embed import embedding_engine, embedding_measure
from service.routes.inference_route import ANSWERED_BY, ERRORS, Api
from service.schemas import Body, Dimensions, Inputs, Name, TextsOrIds
from service.settings import Settings
from service.web.call import Answer, Call, CurrentCall

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


class ClassificationRequest(Body):
    """The body of POST /v1/classify."""

    input: Inputs = Field(description="One text or a list of texts.")
    model: ModelName = None
    use_activation: bool | None = Field(
        None, description="false returns logits instead of probabilities. Default: true."
    )
    user: User = None
    cache_salt: Salt = None


class Classification(BaseModel):
    """The class of one text."""

    index: int
    label: str  # of the highest probability
    probs: list[float]  # one per class, in the order of the classes
    num_classes: int


class Classifications(BaseModel):
    """The response of POST /v1/classify."""

    id: str
    object: Literal["list"]
    created: int  # Unix time
    model: str
    data: list[Classification]
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

router = APIRouter(prefix="/v1", tags=[OPENAI.tag])

# Accepts every name, as a name of --served-model-name.
_ANY = "*"
# Says for itself that the client means whatever model the server has.
_DEFAULT = "default"
_STARTED = int(time.time())
_RESPONSES: dict[int | str, dict[str, Any]] = {
    **ANSWERED_BY,
    **{status: OPENAI.errors[status] for status in (400, 401, 409, 503)},
}


def served_name(settings: Settings) -> str:
    """Return the name that the server gives its model."""
    return _names(settings.served_model_name or "", settings.model)[0]


def check_model_name(name: str | None, settings: Settings) -> None:
    """Raise UnknownModel if a request is for another model. None: the request is for any model."""
    accepted = _names(settings.served_model_name or "", settings.model)[1]
    if name is not None and name not in accepted and _ANY not in accepted:
        raise UnknownModel(
            f"model is not the model of this server, which is {served_name(settings)}; send this name, or "
            "start the server with --served-model-name and the names that clients send",
            field="model",
        )


@router.get("/models", response_model=Models, responses=_RESPONSES)
async def list_models(call: CurrentCall) -> Response:
    """Return a list with the model that this server serves."""
    return json_response({"object": "list", "data": [_described(call)]})


@router.get("/models/{model:path}", response_model=Model, responses={**_RESPONSES, 404: OPENAI.errors[404]})
async def retrieve_model(call: CurrentCall, model: str) -> Response:
    """Return the model, by any name that requests may give."""
    if not model:
        raise NotFound("no such path; /v1/models lists the model")
    call.serving()  # so that an error names the model too
    check_model_name(model, call.state.settings)
    return json_response(_described(call))


def _described(call: Call) -> dict[str, Any]:
    return {
        "id": served_name(call.state.settings),
        "object": "model",
        "created": _STARTED,
        "owned_by": "attncache",
        "max_model_len": call.engine.tokenizer.max_tokens,
    }


@cache
def _names(served: str, model: str) -> tuple[str, list[str]]:
    """Return the name of the model, and the names that requests may give.

    Kept, because a request would wait for the file system. served: of --served-model-name. model: of --model,
    whose own name is that of its folder, or its id on the Hugging Face Hub.
    """
    own = Path(model).resolve().name if Path(model).is_dir() else model
    given = [name for name in map(str.strip, served.split(",")) if name]
    return next(name for name in (*given, own) if name != _ANY), given or [own, model, _DEFAULT]


async def create_embeddings(call: CurrentCall) -> Answer:
    """Embed one text or several. Embeddings have unit length."""
    engine, settings = embedding_engine(call), call.state.settings
    body = await call.read(EmbeddingsRequest)
    check_model_name(body.model, settings)
    check_count(call, body.input, "input")
    engine.require_dimensions(body.dimensions)
    source = source_of(body.input, settings.truncate, "right")
    if settings.check_token_ids:
        _check_ends(engine, source)
    with named("input"):
        result = await computed(
            call,
            source,
            prompt=prompt_of(engine, source, None),
            reads=embedding_measure(engine, body.dimensions),
            salt=call.salt(body.cache_salt),
        )
    embeddings = engine.embeddings(result.outputs, normalize=True, dimensions=body.dimensions)
    content = {
        "object": "list",
        "data": await json_list(_encoded(embeddings, as_base64=body.encoding_format == "base64"), call),
        "model": served_name(settings),
        "usage": usage_of(result, settings),
    }
    return answer(content, result, call)


def _encoded(embeddings: np.ndarray, *, as_base64: bool) -> Iterator[dict[str, Any]]:
    """Yield the embeddings as objects of JSON: rows of float32 [n, dimensions], or base64 of their bytes."""
    for index, row in enumerate(np.ascontiguousarray(embeddings, dtype="<f4")):
        yield {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(row).decode() if as_base64 else row,
        }


def _check_ends(engine: PrefillEngine, source: Source) -> None:
    """Raise InvalidInput for token ids that lack the special tokens around every text of the model.

    Ids of another tokenizer lack them. Clients of OpenAI may send such ids, and their embeddings would mean
    nothing.
    """
    if not isinstance(source, TokenSequences):
        return
    frame = engine.tokenizer.frame(bare_prompt(engine))
    before, after = frame.before, frame.after
    for index, ids in enumerate(source.sequences):
        if ids[: len(before)] != before or ids[len(ids) - len(after) :] != after:
            raise InvalidInput(
                f"input[{index}] does not begin and end with the special tokens of this model ({before} and "
                f"{after}), so its ids seem to be those of another tokenizer: send text (LangChain does with "
                "check_embedding_ctx_length=False), or ids as /tokenize gives them; a server with "
                "--no-check-token-ids accepts all ids",
                field=f"input[{index}]",
            )


async def create_classifications(call: CurrentCall) -> Answer:
    """Return the probabilities of the labels of the server for each text."""
    settings = call.state.settings
    body = await call.read(ClassificationRequest)
    check_model_name(body.model, settings)
    check_count(call, body.input, "input")
    source = Texts(body.input, settings.truncate)
    with named("input"):
        found = await classified(call, source, salt=call.salt(body.cache_salt))
    rows = found.logits if body.use_activation is False else found.scores()
    best = found.logits.argmax(axis=1).tolist()
    data = (
        {"index": index, "label": found.labels[column], "probs": row, "num_classes": len(found.labels)}
        for index, (column, row) in enumerate(zip(best, rows, strict=True))
    )
    content = {
        "id": f"classify-{call.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": served_name(settings),
        "data": await json_list(data, call),
        "usage": usage_of(found.result, settings),
    }
    return answer(content, found.result, call)


def usage_of(result: PrefillResult, settings: Settings) -> dict[str, Any]:
    """Return the Usage of a request. With --no-reuse-headers, what was reused is left out."""
    usage = {"prompt_tokens": result.all_asked_tokens, "total_tokens": result.all_asked_tokens}
    if not settings.reuse_headers:
        return usage
    details: dict[str, Any] = {"cached_tokens": result.all_cached_tokens}
    if result.blended:
        details["segments"] = [chunk._asdict() for report in result.blended for chunk in report.chunks]
    return {**usage, "prompt_tokens_details": details}
