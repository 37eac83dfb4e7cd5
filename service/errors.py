"""The service's own errors, and the functions that turn any error into a response or a log line.

    bytes           BodyTooLarge, MalformedBody        the client must correct its body
    valid JSON      InvalidInput (core), TooManyInputs, NoEmbedding
    headers         ModelMismatch                      the client requires another model
    /cache          NoKeyValues                        the server stores no keys and values
    session         UnknownSession                     the client can send the whole conversation
    queue           QueueFull, NotReady                the client may retry after `Retry-After`
    engine          InternalError                      a fixed sentence; the details are in the log
                    NotFinite (core)                   the client can omit the text that the error names
    start           InvalidSettings, AddressUnavailable

The body of every error response is {"error": {"code", "message", "field"}}. No message and no log line holds
a user's text.
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
    """The body has more bytes than `--max-body-bytes`. Send fewer inputs per request."""

    code = "body_too_large"
    status = 413


class TooManyInputs(InvalidInput):
    """One request has too many texts or labels, as by `--max-request-inputs`. Send several requests."""

    code = "too_many_inputs"
    status = 422


class NoEmbedding(InvalidInput):
    """The served checkpoint is a classifier and has no embeddings."""

    code = "no_embedding"


class ModelMismatch(AttnCacheError):
    """The request requires a model that this server does not serve. Nothing was computed."""

    code = "model_mismatch"
    status = 409


class NoKeyValues(AttnCacheError):
    """The server stores no keys and values, which the request is about. The message says why."""

    code = "no_key_values"
    status = 409


class NotFound(AttnCacheError):
    """The server has no such path."""

    code = "not_found"
    status = 404


class UnknownSession(AttnCacheError):
    """The server has no history of this session: there never was one, or the history has expired."""

    code = "unknown_session"
    status = 404


class MethodNotAllowed(AttnCacheError):
    """The path exists but does not support the method."""

    code = "method_not_allowed"
    status = 405


class TryLater(AttnCacheError):
    """The request is valid and may succeed after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueFull(TryLater):
    """The request's texts do not fit into the queue at present."""

    code = "queue_full"
    status = 429


class NotReady(TryLater):
    """The model or its database is still loading."""

    code = "not_ready"
    status = 503


class ClientGone(AttnCacheError):
    """The client closed the connection before the response. Only the metrics show this error."""

    code = "client_gone"
    status = 499


class InternalError(AttnCacheError):
    """The server has a bug. The log has the traceback; the client gets a fixed sentence."""

    code = "internal_error"
    status = 500

    def __init__(self) -> None:
        super().__init__("the server failed on this request; the server's log says where")


class InvalidSettings(AttnCacheError):
    """An option or environment variable of `serve` is unknown or has a value that is not accepted."""

    code = "invalid_settings"


class AddressUnavailable(AttnCacheError):
    """The host and port to listen on are in use or do not belong to this machine."""

    code = "address_unavailable"


def error_response(error: AttnCacheError) -> Response:
    """Return the response for an error: status, JSON body and, for TryLater, the header `Retry-After`."""
    body = {"error": {"code": error.code, "message": str(error), "field": error.field}}
    response = Response(orjson.dumps(body), error.status, media_type="application/json")
    if isinstance(error, TryLater):
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    return response


async def on_attncache_error(_request: Request, error: Exception) -> Response:
    """Handle an AttnCacheError."""
    assert isinstance(error, AttnCacheError)
    return error_response(error)


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Handle an unknown path or an unsupported method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound("no such path; /docs lists the paths"))
    if error.status_code == 405:
        response = error_response(MethodNotAllowed("this path does not support this method"))
        response.headers.update(error.headers or {})
        return response
    raise error


def log_failure(logger: logging.Logger, event: str, error: BaseException) -> None:
    """Log an unexpected exception with its stack, without its message, which may quote a user's text."""
    logger.error("%s: %s", event, stack_without_values(error))


def stack_without_values(error: BaseException) -> str:
    """Return a traceback without messages: the types and stacks of the causes, then of the exception."""
    cause = error.__cause__ or error.__context__
    earlier = f"{stack_without_values(cause)}\nwhich led to\n" if cause is not None else ""
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return f"{earlier}{kind}\n{''.join(traceback.format_tb(error.__traceback__)).rstrip()}"
