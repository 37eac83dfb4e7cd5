"""One client's connection: how long and how much it may send, and how slowly it may read.

    accepted -> headers -> body -> answer -> idle -> headers ...
                  |          |        |        |
              408, 431   408, 431   cut off   closed

uvicorn's protocol keeps whatever a client sends until the app reads it, for as long as the client wants. The
limits here hold below the app: a client that holds them up costs a socket and some kilobytes, and no task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, cast

from starlette.responses import Response
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from attncache_core import AttnCacheError
from service.errors import (
    HeadersTooLarge,
    MalformedRequest,
    RequestTimeout,
    TooManyConnections,
    error_response,
)
from service.observability.metrics import SLOW_READER
from service.state import ServiceState
from service.web.listeners import CONNECTION, LISTENER, ListenerName
from service.web.wire import JoinedTransport, Parser

# Answered on connections beyond the limit too, so that a busy server is not taken for a dead one.
HEALTH_PATHS = frozenset({"/health", "/ready"})

# A newer connection takes the place of the oldest: one that asks at once is answered in a millisecond.
_MAX_EXCESS_CONNECTIONS = 16
_MAX_PIPELINED = 16
_MAX_HEADERS = 256
_MAX_HEADER_BYTES = 64 * 1024
# Bytes of chunk sizes, chunk extensions and trailers. A body in chunks of one byte has five per byte.
_MAX_FRAMING_BYTES = 64 * 1024
_FRAMING_PER_BODY_BYTE = 8
# A socket that is closed before all was read from it is reset, and the client may lose the response.
_LINGER_SECONDS = 2.0
# A client that has connected sends its first request within this time, unless it is slow.
_FIRST_SECONDS = 0.1
# Of `write_seconds`, while connections are crowded.
_CROWDED_SHARE = 0.1


@dataclass(slots=True, eq=False)
class Connections:
    """What the connections of one listener share. Used on the event loop."""

    name: ListenerName
    state: ServiceState
    open: set[Connection] = field(default_factory=set)
    # Connections beyond the limit, the oldest first: they may only ask for HEALTH_PATHS.
    excess: dict[Connection, None] = field(default_factory=dict)
    draining: bool = False  # responses close their connections

    def count(self) -> int:
        """Return the number of connections."""
        return len(self.open) + len(self.excess)

    def write_seconds(self) -> float:
        """Return the seconds that a client has at present to read a response."""
        # If answers that are not read take most of what they may, others are refused soon.
        return self.state.settings.write_seconds * (_CROWDED_SHARE if self.state.answers.is_half_taken else 1)

    def too_many(self) -> TooManyConnections:
        """Return the error of a connection beyond the limit."""
        most = self.state.settings.max_connections
        return TooManyConnections(f"the server has {most} connections, and accepts no more at present")

    def note_cut(self, reason: str) -> None:
        """Count a connection that was refused or cut. reason: one of metrics.CUT_REASONS."""
        self.state.metrics.cuts.labels(reason).inc()


class _Receiving(IntEnum):
    NOTHING = 0
    HEADERS = 1
    BODY = 2


class Connection(HttpToolsProtocol):
    """uvicorn's protocol within the limits of its listener. `check` must be called from time to time."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = Parser(self, self.ignore_upgrade)
        self._of_listener = connections
        self._receiving = _Receiving.NOTHING
        self._since = 0.0  # when the client was last expected to send something, by the loop's clock
        self._has_served = False
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._header_bytes = 0
        self._body_bytes = 0
        self._bytes_with_framing = 0
        self._stays_open = True  # after a request with Expect whose body comes before its response
        self._refusal: AttnCacheError | None = None  # nothing is received any more
        self._write_paused_since: float | None = None
        self._closing_since: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is received, answered or, on a new connection, about to arrive."""
        if self._receiving is not _Receiving.NOTHING or self._answering() is not None:
            return False
        return self._has_served or self.loop.time() - self._since > _FIRST_SECONDS

    # Called by the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin. If there are too many connections, the oldest one that is too many makes room."""
        super().connection_made(transport)
        self._responses = JoinedTransport(transport)
        self._since = self.loop.time()
        connections = self._of_listener
        if len(connections.open) < connections.state.settings.max_connections:
            connections.open.add(self)
            return
        connections.excess[self] = None
        if len(connections.excess) > _MAX_EXCESS_CONNECTIONS:
            next(iter(connections.excess)).cut(connections.too_many())

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection."""
        self._of_listener.open.discard(self)
        self._of_listener.excess.pop(self, None)
        if running := self._answering():
            # With pipelined requests behind it, uvicorn would only tell the last of them.
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes of requests."""
        if self._refusal is not None:
            if self._closing_since is None:
                # A response comes first. Until then, the client need not send any more.
                self.flow.pause_reading()
            return
        before, cycle = self._receiving, self.cycle
        super().data_received(data)
        if self._receiving is _Receiving.NOTHING or self._refusal is not None:
            return
        # Of the read in which a request begins, an unknown part belongs to the request before.
        if self._receiving is _Receiving.HEADERS:
            self._bound_headers(len(data) if before is _Receiving.HEADERS else 0)
        elif before is _Receiving.BODY and self.cycle is cycle:
            self._bound_framing(len(data))

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than the server writes."""
        super().pause_writing()
        if self._write_paused_since is None:
            self._write_paused_since = self.loop.time()

    def resume_writing(self) -> None:
        """Note that the client has read nearly everything. All parts of a response share its time."""
        super().resume_writing()
        answering = self._answering()
        if answering is None or not answering.response_started:
            self._write_paused_since = None

    # Called by the parser.

    def ignore_upgrade(self, rest: bytes) -> None:
        """Read what comes behind the head of the last request as its body and as further requests."""
        framing = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        # A new parser, because the old one reads nothing behind a request that closes the connection. It gets
        # a head without Upgrade.
        self.parser = Parser(self, self.ignore_upgrade)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing) + rest)

    def on_message_begin(self) -> None:
        """Begin a request. Raises OverflowError, which ends the parser, if too many requests are waiting."""
        if self._receiving is _Receiving.BODY:
            return  # the head of `ignore_upgrade`
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise OverflowError
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope[LISTENER], scope[CONNECTION] = self._of_listener.name, id(self)
        self._receiving = _Receiving.HEADERS
        self._since = self.loop.time()
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        """Start to answer the request, or queue it behind the request before.

        Raises OverflowError, which ends the parser, if the headers are too large.
        """
        if self._receiving is _Receiving.BODY:
            return  # the head of `ignore_upgrade`
        # What came in the first read and in the last one was not counted.
        size = sum(len(name) + len(value) for name, value in self.headers)
        self._bound_headers(max(0, size - self._header_bytes))
        if self._refusal is not None:
            raise OverflowError
        self._body_bytes = self._bytes_with_framing = 0
        super().on_headers_complete()
        self._receiving = _Receiving.BODY
        if self.expect_100_continue:
            # If the response comes first, the client may or may not send the body.
            self._stays_open, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are dropped: the app could not read them."""
        if self._receiving is _Receiving.HEADERS:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body until the app reads it."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the client has sent a whole request."""
        if self.parser.should_upgrade():
            return  # the body comes
        self._receiving = _Receiving.NOTHING
        cycle = self.cycle
        if self.expect_100_continue and not cycle.response_started and not self._of_listener.draining:
            cycle.keep_alive = self._stays_open
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse what the parser did not accept, unless it was refused before."""
        if self._refusal is not None:
            return
        self._refuse(
            MalformedRequest(
                "the request is not HTTP/1.1, its path has more than 65,535 bytes, or more than "
                f"{_MAX_PIPELINED} requests wait for a response"
            )
        )

    # Called by uvicorn.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._responses.begin(cycle)
        connections = self._of_listener
        if connections.draining and not self.pipeline:
            cycle.keep_alive = False
        if self in connections.excess:
            cycle.keep_alive = False
            if cycle.scope["path"] not in HEALTH_PATHS:
                connections.note_cut(TooManyConnections.code)
                app = error_response(connections.too_many())
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the next request that is waiting. There is no timer for each response: `check` closes."""
        self.server_state.total_requests += 1
        self._has_served = True
        self._since = self.loop.time()
        self._responses.flush()
        if not self.flow.write_paused:
            self._write_paused_since = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    # Called by the server.

    def check(self, now: float) -> None:
        """Cut the connection if the client is overdue. now: by the loop's clock."""
        write_seconds = self._of_listener.write_seconds()
        if self._write_paused_since is not None and now - self._write_paused_since > write_seconds:
            self._of_listener.note_cut(SLOW_READER)
            self.transport.abort()
        elif self.transport.is_closing() or self._closing_since is not None:
            self._closing_since = self._closing_since or now
            unread = self.transport.get_write_buffer_size() > 0
            if now - self._closing_since > (write_seconds if unread else _LINGER_SECONDS):
                self.transport.abort()
        elif self.flow.read_paused:
            self._since = now  # the server does not read, so the client is not late
        elif self._refusal is None:
            self._check_receiving(now - self._since)

    def drain(self) -> None:
        """Close the connection once the requests are answered that were received."""
        if self.is_idle:
            self.transport.close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def cut(self, error: AttnCacheError) -> None:
        """Close the connection, with this error as the response to what was not answered yet."""
        self._of_listener.excess.pop(self, None)
        self._of_listener.note_cut(error.code)
        self._refusal = error
        self._end_with(error)

    # Inside.

    def _answering(self) -> RequestResponseCycle | None:
        running = self._running
        return None if running is None or running.response_complete else running

    def _check_receiving(self, waited: float) -> None:
        limits = self._of_listener.state.settings
        if self._receiving is _Receiving.HEADERS and waited > limits.header_seconds:
            self._refuse(_late("headers", limits.header_seconds))
        elif self._receiving is _Receiving.BODY and self.cycle.response_complete:
            if waited > _LINGER_SECONDS:
                self.transport.close()  # the client had time to read why its body is not wanted
        elif self._receiving is _Receiving.BODY and waited > limits.body_seconds:
            self._refuse(_late("body", limits.body_seconds))
        elif self.is_idle and waited > (
            limits.keep_alive_seconds if self._has_served else limits.header_seconds
        ):
            self.transport.close()

    def _bound_headers(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > _MAX_HEADER_BYTES or len(self.headers) > _MAX_HEADERS:
            self._refuse(
                HeadersTooLarge(
                    f"the headers must have at most {_MAX_HEADER_BYTES} bytes and {_MAX_HEADERS} fields"
                )
            )

    def _bound_framing(self, count: int) -> None:
        self._bytes_with_framing += count
        framing = self._bytes_with_framing - self._body_bytes
        if framing > _MAX_FRAMING_BYTES + _FRAMING_PER_BODY_BYTE * self._body_bytes:
            self._refuse(
                HeadersTooLarge(
                    f"chunk extensions and trailers must have at most {_MAX_FRAMING_BYTES} bytes; send "
                    "larger chunks, or a Content-Length"
                )
            )

    def _refuse(self, error: AttnCacheError) -> None:
        """Receive nothing any more, and close the connection after a response to what is being received.

        If requests that were received before are not answered yet, the connection is closed after their
        responses instead: the client would take the error for the response to the first of them.
        """
        self._refusal = error
        self._of_listener.note_cut(error.code)
        incomplete = self.cycle if self._receiving is _Receiving.BODY else None
        answering = self._answering()
        if answering is None or answering is incomplete:
            self._end_with(error)
            return
        self.pipeline = deque(entry for entry in self.pipeline if entry[0] is not incomplete)
        last = self.pipeline[0][0] if self.pipeline else answering
        last.keep_alive = False

    def _end_with(self, error: AttnCacheError) -> None:
        """Tell the app that the client is gone, and the client the error, unless a response has begun."""
        self.pipeline.clear()
        receiving = self.cycle if self._receiving is _Receiving.BODY else None
        answering = self._answering()
        if not any(cycle.response_started for cycle in (receiving, answering) if cycle is not None):
            self.transport.write(_on_the_wire(error_response(error)))
        if answering is not None:
            answering.disconnected = True
            answering.message_event.set()
        # Close the connection when the client has closed its side, or soon.
        self._closing_since = self.loop.time()
        self._responses.flush()
        if self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()


def _late(what: str, seconds: float) -> RequestTimeout:
    return RequestTimeout(f"the {what} of the request did not arrive within {seconds:g} seconds")


def _on_the_wire(response: Response) -> bytes:
    fields = [*response.raw_headers, (b"connection", b"close")]
    head = b"".join(b"%s: %s\r\n" % field for field in fields)
    return STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body)
