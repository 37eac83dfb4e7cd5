"""The sockets that the server listens on, and which routes each of them serves.

    --host, --port or --unix-socket   "public"
    --admin-host, --admin-port        "admin": the routes for operators, which are then not public

All sockets listen before the model is loaded, so that an address that is taken is reported at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attncache_core.runtime.files import when_written
from service.errors import AddressUnavailable, InvalidSettings
from service.settings import Settings, option_name

ListenerName = Literal["public", "admin"]
# Key in a request's ASGI scope: the name of the listener that accepted the connection.
LISTENER = "attncache.listener"
# Key in a request's ASGI scope: what tells its connection from others. Unix sockets give no address.
CONNECTION = "attncache.connection"
# Paths for operators, with all that is below them.
OPERATORS_PATHS = ("/metrics", "/info", "/docs", "/openapi.json", "/cache", "/explain")

# Connections that the system keeps until they are accepted. It drops further ones, which try again later.
BACKLOG = 2048
# Of the socket's file: the user and the group of the server may connect.
_UNIX_SOCKET_MODE = 0o660


class Certificate:
    """The certificate chain and key of a server, read from files, and again when the files are replaced."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises InvalidSettings, which names the file and what is wrong with it."""
        self._cert, self._key = cert, key
        self._written = self._when_written()
        self.context = self._load()  # for new connections

    def read_again(self) -> None:
        """Use the files as they are now. Raises InvalidSettings, and changes nothing then.

        If they have not changed, the context stays, in which clients resume their TLS sessions, also those
        that they began with another worker.
        """
        written = self._when_written()
        if None in written or written != self._written:
            self.context = self._load()
            self._written = written

    def _when_written(self) -> list[tuple[int, ...] | None]:
        return [when_written(path) for path in (self._cert, self._key)]

    def _load(self) -> ssl.SSLContext:
        for option, path in (("tls_cert", self._cert), ("tls_key", self._key)):
            _refuse_unreadable(option, path)
        # A new context each time, because a context keeps one certificate for each kind of key (RSA, ECDSA).
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._cert, self._key, password="")
        except ssl.SSLError as error:
            raise InvalidSettings(_what_is_wrong(error, self._cert, self._key), field="tls_cert") from error
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            message = f"--tls-cert {self._cert} cannot be read: {reason}"
            raise InvalidSettings(message, field="tls_cert") from error
        return context


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """A socket that listens."""

    name: ListenerName
    socket: socket.socket
    url: str
    certificate: Certificate | None = None  # None: HTTP without TLS
    unix_socket: Path | None = None

    def close(self) -> None:
        """Listen no more, and remove the file of a Unix socket, unless another server listens there."""
        self.socket.close()
        if self.unix_socket is not None:
            with contextlib.suppress(OSError):
                if _is_left_over(self.unix_socket):
                    self.unix_socket.unlink()


def open_listeners(settings: Settings) -> list[Listener]:
    """Return the listeners of these settings: the public one first.

    Raises AddressUnavailable, and InvalidSettings if certificate and key cannot be used.
    """
    cert, key = settings.tls_cert, settings.tls_key
    certificate = Certificate(cert, key) if cert and key else None
    # Before a Unix socket, whose file a start that failed would leave.
    admin = []
    if settings.admin_port is not None:
        admin = [_tcp("admin", settings.admin_host, settings.admin_port, certificate)]
    if settings.unix_socket is not None:
        path = settings.unix_socket
        return [Listener("public", bind_unix(path), f"unix:{path}", unix_socket=path), *admin]
    return [_tcp("public", settings.host, settings.port, certificate), *admin]


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
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host looks like this
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise AddressUnavailable(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Return a Unix socket that listens at `path`. The file of a server that has ended is replaced.

    Raises AddressUnavailable if another server listens there, or the path is no socket or not writable.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            path.unlink()
        listener.bind(os.fspath(path))
        # Nobody can connect before `listen`, so nobody connects with wider permissions.
        path.chmod(_UNIX_SOCKET_MODE)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise AddressUnavailable(f"cannot listen on the Unix socket {path}: {reason}") from error
    return listener


def certificate_of(listeners: Sequence[Listener]) -> Certificate | None:
    """Return the certificate, which all listeners of TCP share."""
    return next((listener.certificate for listener in listeners if listener.certificate), None)


def is_for_operators(path: str) -> bool:
    """Return whether a path belongs to the routes for operators."""
    return is_among(path, OPERATORS_PATHS)


def is_among(path: str, paths: Sequence[str]) -> bool:
    """Return whether a path is one of these, or below one of them."""
    return any(path == known or path.startswith(f"{known}/") for known in paths)


def _tcp(name: ListenerName, host: str, port: int, certificate: Certificate | None) -> Listener:
    listener = bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if certificate else 'http'}://{shown}:{listener.getsockname()[1]}"
    return Listener(name, listener, url, certificate)


def _is_left_over(path: Path) -> bool:
    """Return whether the file is a socket that nobody listens on. Raises OSError if it is anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
    raise OSError(errno.EADDRINUSE, "another server listens there")


def _refuse_unreadable(option: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        message = f"{option_name(option)} {path} cannot be read: {reason}"
        raise InvalidSettings(message, field=option) from error


def _what_is_wrong(error: ssl.SSLError, cert: Path, key: Path) -> str:
    # The second one, if the key is of another kind than the certificate's.
    if error.reason in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
        return (
            f"--tls-key {key} is not the key of --tls-cert {cert}, in which the certificate of the server "
            "itself must come first"
        )
    return (
        f"--tls-cert {cert} and --tls-key {key} cannot be used: accepted are a certificate chain and its key "
        f"in PEM, the key not encrypted ({error.reason or 'no PEM'})"
    )
