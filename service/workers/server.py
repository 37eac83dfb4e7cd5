"""Listen, serve and stop: the process around the app.

SIGTERM, Ctrl+C    serve on for --drain-delay-seconds, then refuse connections, finish what was received, end.
                   Another one ends the delay or, behind the delay, the process. A worker heeds one SIGTERM
SIGHUP             read certificates and other files again, or stop if there are none
loading fails      end, and return the exception
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from attncache_core import AttnCacheError
from service.app import create_app
from service.ending import IGNORES_HANGUP, early_hangups, end_process
from service.errors import ShuttingDown, log_failure
from service.settings import Settings
from service.state import Loaded, Pause, ServiceState
from service.upkeep.group import Worker
from service.web.connection import Connection, Connections
from service.web.listeners import Listener, certificate_of
from service.workers.acceptor import Acceptor

logger = logging.getLogger(__name__)

# The exit status when the app does not start; uvicorn uses this one too.
_STARTUP_FAILURE = 3
# Of the seconds until the process ends: what is left for closing after the last response.
_CLOSING_SHARE = 0.2
_MAX_CLOSING_SECONDS = 5.0
_CUT_SECONDS = 0.5
_SECONDS_BETWEEN_CHECKS = 1.0
# Requests that wait are some ten objects each, and each garbage collection looks at the new ones.
_NEW_OBJECTS = 20_000
# Beside connections: the model's files, segments of the database, threads' descriptors.
_OTHER_FILES = 512
# Half of the files that a process may open may be blocks of keys and values.
_BLOCK_FILES = 8192
# With several workers, a connection is left to the others for so long per connection that this worker has.
# The bound is about the time of a batch.
_DELAY_SECONDS, _MAX_DELAY_SECONDS = 0.0005, 0.01
# Then a worker takes one more for so many connections that it has, so that a thousand clients do not wait for
# long.
_AT_ONCE = 8
# A worker that loads or hangs leaves connections to the others, unless nobody takes them.
_UNREADY_SECONDS = 1.0
# uvicorn's main loop ticks this often, and so does the drain.
_TICK_SECONDS = 0.1


def run_server(
    settings: Settings,
    load_engines: Callable[[], Iterator[Loaded]],
    listeners: Sequence[Listener],
    worker: Worker | None = None,
) -> BaseException | None:
    """Serve until a signal arrives, or until `load_engines` raises before it yields an engine.

    worker: this process, if several share the listeners; None: it serves alone. Returns the exception of
    `load_engines`, or None. Ends the process with code 0 if anything still hangs `drain_seconds` after the
    signal. The caller ends the process by `end_process`, because threads may still load or compute.
    """
    failures: list[BaseException] = []

    def load() -> Iterator[Loaded]:
        for loaded in load_engines():
            if not isinstance(loaded, str | Pause):
                look_at_requests_only()
            yield loaded

    def fail(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(settings, load, fail, worker)
    server = Server(app, settings, listeners, is_alone=worker is None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    signal.signal(signal.SIGHUP, server.handle_hangup)
    if early_hangups and worker is None:
        server.handle_hangup(early_hangups[0], None)
    files = len(listeners) * settings.max_connections + _OTHER_FILES
    allow_files(files, 2 * max(files, _BLOCK_FILES) if settings.kv_dir else files)
    for listener in listeners if worker is None else ():
        logger.info("listening on %s (%s), loading %s", listener.url, listener.name, settings.model)
    try:
        server.run()
    finally:
        for listener in listeners:
            listener.close()
    if failures:
        return failures[0]
    logger.info("stopped")
    return None


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        # No access log, because a path and its query can hold a user's text; the metrics count requests.
        access_log=False,
        # The app reads no proxy headers, so uvicorn need not parse them.
        proxy_headers=False,
        server_header=False,
        ws="none",
        lifespan="on",
    )


class Server(uvicorn.Server):
    """uvicorn's server with several listeners, the limits of connections, and a shutdown that ends."""

    def __init__(
        self, app: FastAPI, settings: Settings, listeners: Sequence[Listener], *, is_alone: bool = True
    ) -> None:
        """is_alone: whether no other process has these listeners."""
        super().__init__(_uvicorn_config(app))
        state: ServiceState = app.state.service
        self._listeners = listeners
        self._is_alone = is_alone
        self._of_listeners = [Connections(listener.name, state) for listener in listeners]
        for connections in self._of_listeners:
            state.metrics.follow(state.metrics.connections.labels(connections.name), connections.count)
        self._state = state
        self._drain_seconds, self._delay_seconds = settings.drain_seconds, settings.drain_delay_seconds
        self._drain_at = 0.0  # by time.monotonic, from the first signal on
        self._between_checks = min(
            _SECONDS_BETWEEN_CHECKS,
            settings.header_seconds / 2,
            settings.body_seconds / 2,
            settings.write_seconds / 2,
            settings.keep_alive_seconds / 2,
        )
        self._checked_at = 0.0
        self._hangup = False
        self._guard: threading.Timer | None = None  # from the first signal on
        if certificate := certificate_of(listeners):
            state.reloads.append(certificate.read_again)
            if not is_alone:
                # The supervisor has read the files when it began, and perhaps they were replaced since.
                try:
                    certificate.read_again()
                except AttnCacheError as error:
                    logger.error("%s; the worker begins with the certificate of the supervisor", error)

    # Called by signals.

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin the shutdown; end its delay if it has begun already, or the process."""
        if self._guard is None:
            # Nobody sends requests to a server that was not ready.
            self._drain_after(self._delay_seconds if self._state.is_ready else 0.0)
            self._state.draining = True
        # A worker may get a signal from its supervisor, and the same one from whoever signals both. Only the
        # supervisor sends SIGINT.
        elif time.monotonic() < self._drain_at and (self._is_alone or sig == signal.SIGINT):
            self._drain_after(0.0)
        elif self._is_alone:
            os._exit(128 + sig)

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        """Read files again at the next tick. If there are none, begin the shutdown, but not under nohup."""
        if self._state.reloads:
            self._hangup = True
        elif not IGNORES_HANGUP:
            self.handle_exit(sig, frame)

    def _drain_after(self, delay: float) -> None:
        if self._guard is not None:
            self._guard.cancel()
        # The guard ends the process also if the event loop or the interpreter's clean-up hangs.
        self._guard = threading.Timer(
            delay + self._drain_seconds, end_process, (0, "the server did not close in time, and ends")
        )
        self._guard.daemon = True
        self._guard.start()
        self._drain_at = time.monotonic() + delay
        self.should_exit = not delay

    # Called by uvicorn.

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Start the app and accept connections."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(_STARTUP_FAILURE)
        self.servers = [
            self._accept(connections, listener)
            for connections, listener in zip(self._of_listeners, self._listeners, strict=True)
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Do what is due. Returns whether the shutdown begins."""
        self._check_connections()
        if self._hangup:
            self._hangup = False
            reload_all(self._state.reloads)
        if self._guard is not None and time.monotonic() >= self._drain_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Refuse new connections, finish what was received, as long as there is time, then close."""
        for server in self.servers:
            server.close()
        closing = min(_MAX_CLOSING_SECONDS, _CLOSING_SHARE * self._drain_seconds)
        await self._drain(self._drain_seconds - closing)
        for connection in self._connections():
            connection.drain()
            if not connection.is_idle:
                connection.cut(ShuttingDown("the server is ending"))
        if self.server_state.tasks:
            # Requests that were cut notice that their client is gone.
            _, running = await asyncio.wait(self.server_state.tasks, timeout=_CUT_SECONDS)
            for task in running:
                task.cancel()
        await self.lifespan.shutdown()

    # Inside.

    def _accept(self, connections: Connections, listener: Listener) -> asyncio.base_events.Server:
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(connections, self.config, self.server_state, self.lifespan.state, loop)

        turn = [] if self._is_alone else [self._turn_to_accept]
        acceptor = Acceptor(listener, connection, connections.state.settings.header_seconds, *turn)
        # uvicorn only closes it.
        return cast(asyncio.base_events.Server, acceptor)

    def _turn_to_accept(self) -> tuple[float, int]:
        """Return for how long connections are left to other workers, and how many are taken then."""
        count = sum(connections.count() for connections in self._of_listeners)
        if not self._state.is_ready and not self._state.draining:
            return _UNREADY_SECONDS, 1
        return min(_MAX_DELAY_SECONDS, _DELAY_SECONDS * count), 1 + count // _AT_ONCE

    async def _drain(self, seconds: float) -> None:
        """Close each connection after the response to what it has received, until nothing is in flight."""
        self._state.draining = True
        for connections in self._of_listeners:
            connections.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            for connection in self._connections():
                connection.drain()
            if loop.time() >= deadline or self._is_drained():
                break
            self._check_connections()
            await asyncio.sleep(_TICK_SECONDS)

    def _is_drained(self) -> bool:
        is_idle = all(connection.is_idle for connection in self._connections())
        # A connection that was accepted, and of which `_connections` does not know yet.
        is_opening = any(acceptor.is_opening for acceptor in cast(list[Acceptor], self.servers))
        return is_idle and not self.server_state.tasks and not is_opening

    def _connections(self) -> list[Connection]:
        # All are made by `_accept`.
        return cast(list[Connection], list(self.server_state.connections))

    def _check_connections(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._checked_at >= self._between_checks:
            self._checked_at = now
            for connection in self._connections():
                connection.check(now)


def look_at_requests_only() -> None:
    """Let Python's garbage collector look at new objects only, and less often.

    Every thread waits while the collector looks for objects that hold each other. Modules and models are some
    hundred thousand objects that stay until the end: to look at them all takes 0.2 seconds. An object that
    exists now is still freed when nothing refers to it, unless it refers to itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def allow_files(needed: int, useful: int) -> None:
    """Let this process open `useful` files, or as many as it may; log a warning if fewer than needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < useful:
        allowed = useful if hard == resource.RLIM_INFINITY else min(useful, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            logger.warning(
                "the system allows %d open files, and --max-connections needs %d: raise ulimit -n, or lower "
                "--max-connections",
                allowed,
                needed,
            )


def reload_all(reloads: Iterable[Callable[[], None]]) -> None:
    """Call these functions. What cannot be read again stays as it is, and the log says why."""
    for reload in reloads:
        try:
            reload()
        except AttnCacheError as error:
            logger.error("SIGHUP: %s; the server goes on with what it has", error)
        except Exception as error:
            log_failure(logger, "SIGHUP: the server goes on with what it has", error)
        else:
            logger.info("SIGHUP: read again")
