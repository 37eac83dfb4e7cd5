"""The service's own errors, and the one way in which any error becomes a response or a log line.

    bytes           BodyTooLarge, MalformedBody        the client mends its body
    valid JSON      InvalidInput (core), TooManyInputs, NoEmbedding
    headers         ModelMismatch                      the client pinned another model
    queue           QueueFull, NotReady                the client comes again after `Retry-After`
    engine          InternalError                      a fixed sentence; what happened is in the log
                    NotFinite (core)                   the client leaves the text out that it names
    start           InvalidSettings, AddressUnavailable

Every response that is not a success has the body {"error": {"code", "message", "field"}}. No message
holds a user's text, and neither does a log line.
"""

from __future__ import annotations

import logging
import traceback

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from attncache_core import AttnCacheError, InvalidInput


class MalformedBody(InvalidInput):
    """The body is not JSON in UTF-8."""

    code = "malformed_body"


class BodyTooLarge(InvalidInput):
    """The body has more bytes than `--max-body-bytes`; fewer inputs a request help."""

    code = "body_too_large"
    status = 413


class TooManyInputs(InvalidInput):
    """One request asks for too much, like more texts than `--max-request-inputs`; several requests help."""

    code = "too_many_inputs"
    status = 422


class NoEmbedding(InvalidInput):
    """The served checkpoint classifies: it has classes, no embeddings."""

    code = "no_embedding"


class ModelMismatch(AttnCacheError):
    """The request requires another model than the one served; nothing was computed."""

    code = "model_mismatch"
    status = 409


class NotFound(AttnCacheError):
    """No such path."""

    code = "not_found"
    status = 404


class MethodNotAllowed(AttnCacheError):
    """The path is known, the method is not one of its own."""

    code = "method_not_allowed"
    status = 405


class TryLater(AttnCacheError):
    """Nothing is wrong with the request; `retry_after_seconds` says when it may succeed."""

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueFull(TryLater):
    """The request's texts do not fit into the queue now."""

    code = "queue_full"
    status = 429


class NotReady(TryLater):
    """The model or its database is still being loaded."""

    code = "not_ready"
    status = 503


class ClientGone(AttnCacheError):
    """The client closed the connection before its answer; seen in the metrics only."""

    code = "client_gone"
    status = 499


class InternalError(AttnCacheError):
    """A mistake of ours. The log has the traceback, the client a fixed sentence."""

    code = "internal_error"
    status = 500

    def __init__(self) -> None:
        super().__init__("the server failed on this request; its log says where")


class InvalidSettings(AttnCacheError):
    """An option or environment variable of `serve` is unknown or not accepted."""

    code = "invalid_settings"


class AddressUnavailable(AttnCacheError):
    """The host and port to listen on are taken, or not ours."""

    code = "address_unavailable"


def error_response(error: AttnCacheError) -> Response:
    """The error in the one shape that all errors have, with its status and perhaps `Retry-After`."""
    body = {"error": {"code": error.code, "message": str(error), "field": error.field}}
    response = Response(orjson.dumps(body), error.status, media_type="application/json")
    if isinstance(error, TryLater):
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    return response


async def on_attncache_error(_request: Request, error: Exception) -> Response:
    """The handler for every error of ours."""
    assert isinstance(error, AttnCacheError)
    return error_response(error)


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """The handler for what the router refuses: a path or a method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound("no such path; /docs lists them"))
    if error.status_code == 405:
        response = error_response(MethodNotAllowed("this path does not take this method"))
        response.headers.update(error.headers or {})
        return response
    raise error


def log_failure(logger: logging.Logger, happening: str, error: BaseException) -> None:
    """Log an unexpected exception with its stack but without its message, which may quote a user's text."""
    logger.error("%s: %s", happening, stack_without_values(error))


def stack_without_values(error: BaseException) -> str:
    """Type and stack of the exception, after those of its causes: a traceback without the messages."""
    cause = error.__cause__ or error.__context__
    earlier = f"{stack_without_values(cause)}\nwhich led to\n" if cause is not None else ""
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return f"{earlier}{kind}\n{''.join(traceback.format_tb(error.__traceback__)).rstrip()}"
