"""Listen, serve and stop: the process around the app.

SIGTERM, Ctrl+C    stop accepting requests, finish queued requests, end
loading fails      end, and return the exception
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from attncache_core import PrefillEngine
from service.app import create_app
from service.errors import AddressUnavailable
from service.settings import Settings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# Seconds to wait for open requests at the end: a client that stalls must not keep the process alive.
_STOP_SECONDS = 30
# More than one read from a socket returns, because one read may hold headers and a part of the body.
_MOST_HEADER_BYTES = 512 * 1024


class BoundedHeadersProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the bytes of a request's headers.

    The limit on bodies does not cover headers: uvicorn holds headers in memory before the app runs.
    """

    _header_bytes = 0
    _in_headers = True

    def data_received(self, data: bytes) -> None:
        """Receive bytes from the client; close the connection if the headers have too many bytes."""
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > _MOST_HEADER_BYTES:
                self.send_400_response("The headers are too large.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        super().on_message_begin()
        self._in_headers = True

    def on_headers_complete(self) -> None:
        """Note that the request's headers are complete."""
        super().on_headers_complete()
        self._in_headers = False
        self._header_bytes = 0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on host and port.

    Raises AddressUnavailable if the address is in use or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listen at once: two sockets may be bound to one address, but only one socket may listen.
        listener.listen(_BACKLOG)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise AddressUnavailable(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


def run_server(
    settings: Settings, load_engines: Callable[[], Iterator[PrefillEngine]], listener: socket.socket
) -> BaseException | None:
    """Serve until a signal arrives, or until `load_engines` raises before it yields an engine.

    Returns the exception of `load_engines`, or None. Ends the process with code 0 if a signal arrives during
    loading.
    """
    loading = True
    failures: list[BaseException] = []

    def load() -> Iterator[PrefillEngine]:
        nonlocal loading
        try:
            yield from load_engines()
        finally:
            loading = False

    def fail(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    def stop(*_signal: object) -> None:
        server.should_exit = True

    server = uvicorn.Server(_uvicorn_config(settings, load, fail))
    # uvicorn raises the signal again after it has stopped; without a handler the exit code would be 143.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    logger.info(
        "listening on http://%s:%d, loading %s", settings.host, listener.getsockname()[1], settings.model
    )
    server.run(sockets=[listener])
    if failures:
        return failures[0]
    logger.info("stopped")
    if loading:
        _end_process()
    return None


def _uvicorn_config(
    settings: Settings,
    load_engines: Callable[[], Iterator[PrefillEngine]],
    on_load_failure: Callable[[BaseException], None],
) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(settings, load_engines, on_load_failure),
        log_config=None,
        # No access log, because a path and its query can hold a user's text; the metrics count requests.
        access_log=False,
        # The app reads no proxy headers, so uvicorn need not parse them.
        proxy_headers=False,
        server_header=False,
        ws="none",
        http=BoundedHeadersProtocol,
        lifespan="on",
        timeout_graceful_shutdown=_STOP_SECONDS,
    )


def _end_process() -> None:
    """End with code 0 and without the interpreter's clean-up, which can crash while a thread computes."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)
