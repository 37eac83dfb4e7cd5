"""What the server tells its clients and operators."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from service.settings.names import Group


class Observability(Group):
    """Headers, logs, metrics and traces."""

    title: ClassVar[str] = "Observability"

    reuse_headers: bool = Field(
        True, description="Send headers that tell how many texts of a request reused maps."
    )
    page: bool = Field(True, description="Serve a page at / that shows the server at work.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level of messages that are logged."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Log lines as text, or as JSON objects, one per line."
    )
    access_log: bool = Field(
        False, description="Log a line for each request, with its route, status, time and tokens."
    )
