"""Accept connections on a socket, which several workers may listen on, so that all of them get some.

uvloop would accept one connection in each round of the event loop. When many clients come at once, a round is
long, and clients would wait for seconds. So a server with one process accepts several in a round.

All workers are woken for each connection, and the first one that looks takes it. Without a rule, clients that
keep their connections would share few of the workers. So a worker that has more connections waits longer
before it looks, and takes only some at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from service.web.listeners import BACKLOG, Listener

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 64
# After an error of the system, such as too many open files.
_ERROR_SECONDS = 1.0


class Acceptor:
    """Accepts the connections of one listener for one worker. Used on the event loop."""

    def __init__(
        self,
        listener: Listener,
        connection: Callable[[], asyncio.Protocol],
        handshake_seconds: float,
        turn: Callable[[], tuple[float, int]] = lambda: (0.0, _MAX_AT_ONCE),
    ) -> None:
        """connection: makes the protocol of a connection. handshake_seconds: the most for a TLS handshake.

        turn: returns for how many seconds connections are left to other workers, and how many are taken then.
        """
        self._listener = listener
        self._connection = connection
        self._handshake_seconds = handshake_seconds
        self._turn = turn
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        listener.socket.setblocking(False)
        self._watch()

    @property
    def is_opening(self) -> bool:
        """Whether a connection was accepted that has no protocol yet."""
        return bool(self._opening)

    def close(self) -> None:
        """Accept the connections that wait. The system refuses others, once all workers have closed."""
        self._is_closed = True
        self._loop.remove_reader(self._listener.socket)
        if self._timer is not None:
            self._timer.cancel()
        self._accept(BACKLOG)
        self._listener.close()

    def _watch(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.socket, self._on_connection)

    def _on_connection(self) -> None:
        seconds, maximum = self._turn()
        if seconds:
            self._pause(seconds, lambda: self._accept(maximum))
        else:
            self._accept(maximum)

    def _pause(self, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        self._loop.remove_reader(self._listener.socket)

        def resume() -> None:
            self._watch()
            then()

        self._timer = self._loop.call_later(seconds, resume)

    def _accept(self, maximum: int = _MAX_AT_ONCE) -> None:
        for _ in range(maximum):
            try:
                client, _ = self._listener.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # nobody waits any more, or another worker took the connection, or the client has left
            except OSError as error:
                logger.error("cannot accept connections: %s", error.strerror)
                self._pause(_ERROR_SECONDS)
                return
            self._take(client)

    def _take(self, client: socket.socket) -> None:
        client.setblocking(False)
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._open(client))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket) -> None:
        certificate = self._listener.certificate
        tls = certificate.context if certificate else None
        # A client that leaves, or does not finish its handshake, is no error of the server.
        with contextlib.suppress(OSError, TimeoutError):
            handshake_seconds = self._handshake_seconds if tls else None
            await self._loop.connect_accepted_socket(
                self._connection, client, ssl=tls, ssl_handshake_timeout=handshake_seconds
            )
