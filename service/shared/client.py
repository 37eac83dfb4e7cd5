"""Ask the shared store, within a bound of time. The one module that imports valkey.

    question -> Circuit: closed -> answer
                                -> no answer in time: the circuit is open for a moment
                        open    -> refused at once; after that time, one question tries again, and each
                                   failure doubles the time, up to some seconds

Messages hold neither the password nor what was sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import valkey
import valkey.asyncio
from valkey import exceptions

from service.errors import InvalidSettings, SharedUnavailable
from service.settings.cluster import SharedAddress

logger = logging.getLogger(__name__)

# After the first failure, which may be a hiccup of the store, and at most.
_FIRST_OPEN_SECONDS, OPEN_SECONDS = 0.25, 5.0
_TOLD_AGAIN_SECONDS = 3600.0
# Within the patience of a question. A process that stood still has not looked: its own delay does not count.
_LOOKS = 10
# A new connection needs some round trips, with TLS.
_CONNECT_SECONDS = 0.25
_START_SECONDS = 5.0
# Large values are read several times faster than with the default of 64 KiB.
_READ_BYTES = 2**20
_MAX_CONNECTIONS = 64  # of threads
_MAX_AT_ONCE = 64  # questions of an event loop: enough also if each takes 20 ms
# A placeholder in a key. Each connection replaces it by the run id of the Valkey process that it leads to. So
# a process that starts again, or takes over from another one, finds no value that was kept before: it may be
# an older one.
RUN = "{run}"


class _NoRunId(exceptions.ConnectionError):
    """A server that may be compatible with Valkey, but whose restarts cannot be noticed."""


_REASONS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (exceptions.AuthenticationError, "the user or the password is not accepted"),
    (exceptions.AuthorizationError, "the user may not do this"),
    (exceptions.NoPermissionError, "the user may not do this"),
    (exceptions.OutOfMemoryError, "it is full and evicts nothing"),
    (exceptions.ReadOnlyError, "it is a replica, which takes no writes"),
    (exceptions.BusyLoadingError, "it loads its data"),
    (exceptions.TimeoutError, "there is no answer in time"),
    (TimeoutError, "there is no answer in time"),
    (_NoRunId, "its INFO has no run_id"),
    (exceptions.ConnectionError, "there is no connection"),
    ((OSError, RuntimeError), "there is no connection"),
)
_FAILURES = (exceptions.ValkeyError, OSError)
# RuntimeError: uvloop's, about a connection that the server has closed.
_FAILURES_ON_LOOP = (*_FAILURES, RuntimeError)
_Answer = TypeVar("_Answer")


class Circuit:
    """Whether a store is asked: after a failure, nobody waits for it for a moment."""

    def __init__(
        self, address: SharedAddress, without: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """without: what happens meanwhile, for the log."""
        self._address, self._without, self._clock = address, without, clock
        self._opens_until = 0.0
        self.open_seconds = 0.0  # for which nobody asks after the last failure
        self._is_trying = False  # one question, while the others are refused
        self.is_away = False  # from the first failure until the next answer
        self._told: dict[str, float] = {}  # when each reason for a refusal may be logged again

    def may_ask(self) -> bool:
        """Return whether to ask now. While the store is away, one caller may after each pause."""
        now = self._clock()
        if now < self._opens_until:
            return False
        if self.is_away:
            self._opens_until, self._is_trying = now + OPEN_SECONDS, True
        return True

    def note(self, error: Exception) -> None:
        """Note that a question failed: there was no answer, or the server refuses what was asked."""
        reason = _reason(error)
        if isinstance(error, exceptions.ResponseError):
            self._refused(reason)
        else:
            self.failed(reason)

    def _refused(self, reason: str) -> None:
        """Other questions may be answered. Logged once in a while."""
        self.answered()
        now = self._clock()
        if now >= self._told.get(reason, now):
            self._told[reason] = now + _TOLD_AGAIN_SECONDS
            logger.error("the shared store %s refuses what it is asked: %s", self._address, reason)

    def failed(self, reason: str) -> None:
        """Note that there was no answer: nobody asks for a while. Logged once until there is one."""
        if self.is_away and not self._is_trying:
            return  # it was asked before the failure that is known
        self.open_seconds = min(2 * self.open_seconds or _FIRST_OPEN_SECONDS, OPEN_SECONDS)
        self._opens_until, self._is_trying = self._clock() + self.open_seconds, False
        if not self.is_away:
            self.is_away = True
            logger.error("the shared store %s cannot be used: %s; %s", self._address, reason, self._without)

    def answered(self) -> None:
        """Note that there was an answer."""
        self._opens_until = self.open_seconds = 0.0
        if self.is_away:
            self.is_away = False
            logger.info("the shared store %s can be used again", self._address)


class Client:
    """Asks from an event loop."""

    def __init__(self, address: SharedAddress, circuit: Circuit, patience_seconds: float) -> None:
        self._circuit, self._patience = circuit, patience_seconds
        kind = _EncryptedRunConnection if address.is_encrypted else _RunConnection
        self._pool = valkey.asyncio.ConnectionPool(connection_class=kind, **_options(address))
        self._server = valkey.asyncio.Valkey(connection_pool=self._pool)
        # The time of a question begins with its turn, because a burst of questions is no fault of the store.
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)

    async def ask(self, question: Callable[[Any], Awaitable[_Answer]]) -> _Answer:
        """Return the answer to a question to the server. Raises SharedUnavailable."""
        async with self._turns:
            if not self._circuit.may_ask():
                raise self._unavailable("it did not answer before")
            try:
                answer = await self._answer(question)
            except _FAILURES_ON_LOOP as error:
                self._circuit.note(error)
                raise self._unavailable(_reason(error)) from None
            self._circuit.answered()
            return answer

    async def _answer(self, question: Callable[[Any], Awaitable[_Answer]]) -> _Answer:
        asked = asyncio.ensure_future(question(self._server))
        try:
            for _ in range(_LOOKS):
                await asyncio.wait([asked], timeout=self._patience / _LOOKS)
                if asked.done():
                    return asked.result()
            raise TimeoutError
        finally:
            # Nobody else looks at an error that the question ends with.
            asked.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            asked.cancel()

    def _unavailable(self, reason: str) -> SharedUnavailable:
        return SharedUnavailable(
            f"the store that the servers share cannot be used: {reason}; send the request again with its "
            "X-Request-Id",
            retry_after_seconds=max(1, math.ceil(self._circuit.open_seconds)),
        )

    async def close(self) -> None:
        """End all connections."""
        await self._pool.aclose()


class _RunConnection(valkey.asyncio.Connection):
    """A connection that puts the run id of the Valkey process that it leads to into keys, in place of RUN."""

    _run = RUN

    async def on_connect(self) -> None:
        """Log in, and ask for the run id. Called again after each loss of the connection."""
        self._run = RUN  # a password is sent as it is
        await super().on_connect()
        await self.send_command("INFO", "server")
        found = re.search(rb"run_id:(\w+)", await self.read_response())
        if found is None:
            raise _NoRunId
        self._run = found[1].decode()

    def pack_command(self, *args: Any) -> list[bytes]:
        """Return the bytes of a command."""
        return super().pack_command(
            *(arg.replace(RUN, self._run) if isinstance(arg, str) else arg for arg in args)
        )


class _EncryptedRunConnection(_RunConnection, valkey.asyncio.SSLConnection):
    """The same with TLS."""


class BlockingClient:
    """Asks from any thread."""

    def __init__(
        self,
        address: SharedAddress,
        circuit: Circuit,
        patience_seconds: float,
        part_seconds: float | None = None,
    ) -> None:
        """patience_seconds: for a question. part_seconds: for each part of the answer; None: as long."""
        self._circuit = circuit
        self._patience = _Patience(part_seconds or patience_seconds, patience_seconds)
        self._pool = valkey.BlockingConnectionPool(  # type: ignore[no-untyped-call]
            connection_class=_EncryptedConnection if address.is_encrypted else _BoundedConnection,
            timeout=part_seconds or patience_seconds,
            max_connections=_MAX_CONNECTIONS,
            socket_timeout=_CONNECT_SECONDS,
            socket_connect_timeout=_CONNECT_SECONDS,
            patience=self._patience,
            **_options(address),
        )
        self._server = valkey.Valkey(connection_pool=self._pool)

    def ask(self, question: Callable[[Any], _Answer]) -> _Answer:
        """Return the answer to a question to the server. Raises OSError."""
        if not self._circuit.may_ask():
            raise OSError("it did not answer before")
        self._patience.begin()
        try:
            answer = question(self._server)
        except _FAILURES as error:
            self._circuit.note(error)
            raise OSError(_reason(error)) from None
        self._circuit.answered()
        return answer

    def close(self) -> None:
        """End all connections."""
        self._pool.disconnect()


class _Patience(threading.local):
    """How long the question of a thread may still wait. Its time begins when its first byte is sent."""

    def __init__(self, part_seconds: float, whole_seconds: float) -> None:
        self._of_questions = part_seconds, whole_seconds
        self.begin()

    def begin(self, *seconds: float) -> None:
        """Begin a question. seconds: for each part and for all of it; none: those of questions."""
        self._part, self._whole = seconds or self._of_questions
        self._until: float | None = None

    def left(self) -> float:
        """Return how many seconds the next part may take. Raises TimeoutError if there are none."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._whole
        if now >= self._until:
            raise TimeoutError
        return min(self._part, self._until - now)


class _BoundedSocket:
    """A socket that waits no longer than a patience lasts. valkey's bound holds for each part alone."""

    def __init__(self, connected: socket.socket, patience: _Patience) -> None:
        self._socket, self._patience = connected, patience
        self._polls = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, seconds: float | None) -> None:
        """Wait not at all, or as long as the patience lasts."""
        self._polls = seconds == 0

    def recv(self, size: int) -> bytes:
        """Return the next part."""
        self._bound()
        return self._socket.recv(size)

    def recv_into(self, buffer: bytearray) -> int:
        """Read the next part, as libvalkey does where it is installed."""
        self._bound()
        return self._socket.recv_into(buffer)

    def sendall(self, content: bytes) -> None:
        """Send everything."""
        rest = memoryview(content)
        while rest:
            self._bound()
            rest = rest[self._socket.send(rest) :]

    def _bound(self) -> None:
        self._socket.settimeout(0.0 if self._polls else self._patience.left())


class _BoundedConnection(valkey.Connection):
    """A connection of which nothing takes longer than a patience lasts."""

    def __init__(self, patience: _Patience, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._patience = patience

    def connect(self) -> None:
        """Connect and log in, unless that was done. The patience for the question begins afterwards."""
        if self._sock is None:
            self._patience.begin(_CONNECT_SECONDS, _CONNECT_SECONDS)
            super().connect()  # type: ignore[no-untyped-call]
            self._patience.begin()

    def _connect(self) -> _BoundedSocket:
        # In another thread, because nothing bounds how long a name is looked up.
        made: Future[socket.socket] = Future()
        connect: Callable[[], socket.socket] = super()._connect

        def work() -> None:
            try:
                made.set_result(connect())
            except Exception as error:
                made.set_exception(error)

        threading.Thread(target=work, name="shared-connect", daemon=True).start()
        try:
            return _BoundedSocket(made.result(self._patience.left()), self._patience)
        except TimeoutError:
            made.add_done_callback(_close_late)
            raise


class _EncryptedConnection(_BoundedConnection, valkey.SSLConnection):
    """The same with TLS."""


def _close_late(made: Future[socket.socket]) -> None:
    if made.exception() is None:
        made.result().close()


def check_store(address: SharedAddress, *, has_blocks: bool) -> None:
    """Warn if the shared store cannot be used at the start, or is not set up for what it will have.

    has_blocks: of keys and values, which need bounded memory. Raises InvalidSettings if it refuses the user
    or the password, if it has no database of the number in the address, or if its certificate is not
    accepted.
    """
    kind = valkey.SSLConnection if address.is_encrypted else valkey.Connection
    limits: dict[str, Any] = {"socket_timeout": _START_SECONDS, "socket_connect_timeout": _START_SECONDS}
    pool = valkey.ConnectionPool(connection_class=kind, **limits, **_options(address))
    server = valkey.Valkey(connection_pool=pool)
    try:
        memory: Any = server.info("memory")
    except _FAILURES as error:
        is_refused = isinstance(error, exceptions.AuthenticationError) or _lacks_database(error)
        if is_refused or _has_bad_certificate(error):
            raise InvalidSettings(
                f"--shared {address} cannot be used: {_reason(error)}", field="shared"
            ) from None
        logger.warning("the shared store %s cannot be used yet: %s", address, _reason(error))
        return
    finally:
        pool.disconnect()
    policy = str(memory.get("maxmemory_policy", ""))
    if has_blocks and (not memory.get("maxmemory") or policy != "allkeys-lru"):
        logger.warning(
            "the shared store %s has maxmemory %s and maxmemory-policy %s, so it grows until it fails or "
            "refuses writes; set a maxmemory, and allkeys-lru",
            address,
            memory.get("maxmemory", "unknown"),
            policy or "unknown",
        )


def _options(address: SharedAddress) -> dict[str, Any]:
    # The name is checked too, which the client leaves out by default.
    encrypted = {"ssl_cert_reqs": "required", "ssl_check_hostname": True} if address.is_encrypted else {}
    return {
        "host": address.host,
        "port": address.port,
        "db": address.database,
        "username": address.user,
        "password": address.password,
        "socket_read_size": _READ_BYTES,
        "socket_keepalive": True,
        **encrypted,
    }


def _has_bad_certificate(error: BaseException | None) -> bool:
    while error is not None:
        if (
            isinstance(error, ssl.SSLCertVerificationError)
            or "certificate verify failed" in str(error).lower()
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _lacks_database(error: Exception) -> bool:
    return isinstance(error, exceptions.ResponseError) and "DB index" in str(error)


def is_of_another_type(error: BaseException) -> bool:
    """Return whether the store has something else under a name than the value that was asked for."""
    return isinstance(error, exceptions.ResponseError) and str(error).startswith("WRONGTYPE")


def _reason(error: Exception) -> str:
    """Say what went wrong, in words of this module: a message of the server may quote what was sent."""
    if _has_bad_certificate(error):
        return "its certificate is not accepted"
    if _lacks_database(error):
        return "it has no database of this number"
    known = (words for kind, words in _REASONS if isinstance(error, kind))
    return next(known, f"it answers with an error ({type(error).__name__})")
