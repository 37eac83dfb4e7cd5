"""Shared parts of the routes of text-embeddings-inference: the documentation, and whether texts are cut."""

from __future__ import annotations

from typing import Any

from service.routes.common import ERRORS
from service.routes.tei.schemas import TeiErrorBody
from service.settings import Settings

TAG = "text-embeddings-inference"
TEI_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**documented, "model": TeiErrorBody} for status, documented in ERRORS.items() if status != 404
}


def truncates(truncate: bool | None, settings: Settings) -> bool:
    """Return whether texts that are too long are cut. truncate: of the request; None: as the server does."""
    return settings.truncate if truncate is None else truncate
