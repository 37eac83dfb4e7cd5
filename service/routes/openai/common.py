"""Shared parts of the routes under /v1: the documentation of errors, and the usage."""

from __future__ import annotations

from typing import Any

from service.batching.results import RequestResult
from service.routes.common import ERRORS
from service.routes.openai.schemas import OpenAIErrorBody
from service.settings import Settings

TAG = "OpenAI"
OPENAI_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**documented, "model": OpenAIErrorBody} for status, documented in ERRORS.items()
} | {404: {"model": OpenAIErrorBody, "description": "The server does not serve the model."}}


def usage_of(result: RequestResult, settings: Settings) -> dict[str, Any]:
    """Return the tokens of a request. With --no-reuse-headers, what was reused is left out."""
    usage = {"prompt_tokens": result.asked_tokens, "total_tokens": result.asked_tokens}
    if not settings.reuse_headers:
        return usage
    details: dict[str, Any] = {"cached_tokens": result.cached_tokens}
    if result.blended:
        details["segments"] = [chunk._asdict() for report in result.blended for chunk in report.chunks]
    return {**usage, "prompt_tokens_details": details}
