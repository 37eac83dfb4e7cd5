"""The JSON of errors, in the shapes that the clients of each API read.

this server's own    {"error": {"code", "message", "field"}}
OpenAI's, on /v1     {"error": {"message", "type", "param", "code"}}
that of text-embeddings-inference (TEI)    {"error", "error_type"}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attncache_core import AttnCacheError, InputTooLong
from service.errors import (
    QueueFull,
    QuotaExceeded,
    Unauthorized,
    UnknownModel,
    ours,
)

# Returns the JSON of an error.
ErrorShape = Callable[[AttnCacheError], dict[str, Any]]

# Clients of OpenAI read these codes.
_OPENAI_CODES = {
    Unauthorized.code: "invalid_api_key",
    UnknownModel.code: "model_not_found",
    InputTooLong.code: "context_length_exceeded",
    QueueFull.code: "rate_limit_exceeded",
    QuotaExceeded.code: "rate_limit_exceeded",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_TEI_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Overloaded"}
# The paths of TEI that this server has no older route of its own for.
TEI_PATHS = frozenset({"/", "/embed_all", "/predict", "/similarity", "/rerank", "/tokenize", "/decode"})
_OPENAI_PREFIXES = ("/v1/", "/v2/")


def openai(error: AttnCacheError) -> dict[str, Any]:
    """Return the JSON of an error, as OpenAI's clients read it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": _OPENAI_TYPES.get(error.status, kind),
            "param": error.field,
            "code": _OPENAI_CODES.get(error.code, error.code),
        }
    }


def tei(error: AttnCacheError) -> dict[str, Any]:
    """Return the JSON of an error, as clients of text-embeddings-inference read it."""
    return {"error": str(error), "error_type": _TEI_TYPES.get(error.status, "Validation")}


def shape_of(path: str) -> ErrorShape:
    """Return the shape of errors on a path, whether the path exists or not."""
    if path.startswith(_OPENAI_PREFIXES) or path in ("/v1", "/v2"):
        return openai
    return tei if path in TEI_PATHS else ours
