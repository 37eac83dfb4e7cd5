"""The service's own errors, and the functions that turn any error into a response or a log line.

docs/api.md has a table of all codes, and what a client does about each. No message and no log line holds a
user's text.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

import orjson
from starlette.responses import Response

from attncache_core import AttnCacheError, InvalidInput, NotFinite

# The code of an error, for proxies: whether another server may be asked depends on it, and they read no body.
ERROR_HEADER = "X-AttnCache-Error"


class MalformedRequest(InvalidInput):
    """The bytes of the connection are not HTTP/1.1, or too many requests were sent without a response."""

    code = "malformed_request"


class HeadersTooLarge(InvalidInput):
    """The headers, or the chunk extensions and trailers of the body, have too many bytes or fields."""

    code = "headers_too_large"
    status = 431


class RequestTimeout(InvalidInput):
    """The headers or the body did not arrive in time, as by `--header-seconds` and `--body-seconds`."""

    code = "request_timeout"
    status = 408


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


class UnknownModel(InvalidInput):
    """The field `model` names a model that this server does not serve, as by `--served-model-name`."""

    code = "unknown_model"
    status = 404


class Unauthorized(AttnCacheError):
    """The server requires an API key, and the request has none, or one that the server does not know."""

    code = "unauthorized"
    status = 401

    def __init__(self, message: str, *, challenge: str) -> None:
        """challenge: the value of the header WWW-Authenticate."""
        super().__init__(message)
        self.challenge = challenge


class Forbidden(AttnCacheError):
    """The route is for keys with the word `admin` in the file of `--api-keys`."""

    code = "forbidden"
    status = 403


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

    status = 503

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueFull(TryLater):
    """The request's texts do not fit into the queue at present."""

    code = "queue_full"
    status = 429


class QuotaExceeded(TryLater):
    """The key has used up a quota of the file of `--api-keys`. The message says which one."""

    code = "quota_exceeded"
    status = 429

    def __init__(self, message: str, *, quota: str, retry_after_seconds: int) -> None:
        """quota: its name in the file."""
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.quota = quota


class NotReady(TryLater):
    """The model or its database is still loading."""

    code = "not_ready"


class TooManyConnections(TryLater):
    """The server has as many connections as `--max-connections` allows."""

    code = "too_many_connections"


class ShuttingDown(TryLater):
    """The server is ending. Send the request to another server."""

    code = "shutting_down"


class Stuck(TryLater):
    """A batch, or the event loop, has taken longer than `--stuck-seconds`. The log has the stacks."""

    code = "stuck"


class StoreUnavailable(TryLater):
    """With several workers: what they share, such as histories of sessions, cannot be read or written."""

    code = "store_unavailable"


class SharedUnavailable(StoreUnavailable):
    """With `--shared`: what the servers share cannot be read or written, such as the history of a session."""

    code = "shared_unavailable"


class WorkerUnavailable(TryLater):
    """With several workers: one of them has not done what an operator asks of all."""

    code = "worker_unavailable"


class DeadlineExceeded(AttnCacheError):
    """The request was not answered in time, and its work was dropped."""

    code = "deadline_exceeded"
    status = 504


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


# Clients of OpenAI repeat these requests at once, because of their status. A repetition gets the same error,
# or is computed anew when the server has no time.
_FINAL = (ModelMismatch, NoKeyValues, NotFinite, DeadlineExceeded)


def ours(error: AttnCacheError) -> dict[str, Any]:
    """Return the JSON of an error, in the shape of this server's own routes."""
    return {"error": {"code": error.code, "message": str(error), "field": error.field}}


def error_response(error: AttnCacheError) -> Response:
    """Return the response for an error: status, headers and JSON body."""
    return Response(orjson.dumps(ours(error)), error.status, headers_of(error), media_type="application/json")


def headers_of(error: AttnCacheError) -> dict[str, str]:
    """Return the headers of the response for an error."""
    headers = {ERROR_HEADER: error.code}
    if isinstance(error, _FINAL):
        headers["X-Should-Retry"] = "false"
    if isinstance(error, TryLater):
        headers["Retry-After"] = str(error.retry_after_seconds)
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = error.challenge
    return headers


def rename(error: AttnCacheError, field: str | None) -> None:
    """Let an error name another field, also in its message."""
    if error.field is not None and field is not None and field != error.field:
        error.args = (str(error).replace(error.field, field, 1),)
        error.field = field


def log_failure(logger: logging.Logger, event: str, error: BaseException) -> None:
    """Log an unexpected exception with its stack, without its message, which may quote a user's text."""
    logger.error("%s: %s", event, stack_without_values(error))


def reason_of(error: Exception) -> str:
    """Return the message of an expected error, and of others where they come from."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return str(error) if isinstance(error, AttnCacheError) else stack_without_values(error)


def stack_without_values(error: BaseException) -> str:
    """Return a traceback without messages: the types and stacks of the causes, then of the exception."""
    cause = error.__cause__ or error.__context__
    earlier = f"{stack_without_values(cause)}\nwhich led to\n" if cause is not None else ""
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return f"{earlier}{kind}\n{''.join(traceback.format_tb(error.__traceback__)).rstrip()}"
