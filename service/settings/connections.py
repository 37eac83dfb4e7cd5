"""How long clients may take, and what the process does when work does not end; what the server tells."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from service.settings.names import MAX_SECONDS, Group


class Connections(Group):
    """The limits of each connection."""

    title: ClassVar[str] = "Connections"

    max_connections: int = Field(
        2048,
        ge=1,
        description="Most open connections of each listener. Further connections get status 503, except for "
        "/health and /ready.",
    )
    header_seconds: float = Field(
        10.0,
        gt=0,
        le=MAX_SECONDS,
        description="Seconds for a new connection, and for the headers of a request, to arrive. Status 408 "
        "after that.",
    )
    body_seconds: float = Field(
        30.0,
        gt=0,
        le=MAX_SECONDS,
        description="Seconds for the body of a request to arrive. Status 408 after that.",
    )
    write_seconds: float = Field(
        30.0,
        gt=0,
        le=MAX_SECONDS,
        description="Seconds for a client to read its response. The connection is cut after that.",
    )
    keep_alive_seconds: float = Field(
        75.0,
        gt=0,
        le=MAX_SECONDS,
        description="Close a connection this long after its last response. Longer than a load balancer keeps "
        "its connections.",
    )


class Supervision(Group):
    """When the process ends."""

    title: ClassVar[str] = "Watchdog and shutdown"

    drain_seconds: float = Field(
        30.0,
        ge=1,
        le=MAX_SECONDS,
        description="Seconds from SIGTERM to the end of the process, whatever does not end by itself.",
    )
    drain_delay_seconds: float = Field(
        0.0,
        ge=0,
        le=MAX_SECONDS,
        description="Seconds from SIGTERM in which the server serves on while /ready has status 503, so that "
        "load balancers leave first. --drain-seconds begin after them. A second signal ends the delay.",
    )
    stuck_seconds: float = Field(
        120.0,
        gt=0,
        le=MAX_SECONDS,
        description="A batch, or the event loop, that takes longer is stuck: /ready has status 503, and "
        "after twice the time /health too.",
    )
    exit_when_stuck: bool = Field(
        False,
        description="End the process with exit code 70 when /health would have status 503, so that it is "
        "started again.",
    )


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
