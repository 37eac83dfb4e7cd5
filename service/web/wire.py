"""The parser and the transport of a connection: Upgrade is ignored, and a head is sent with its body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class JoinedTransport(asyncio.Transport):
    """The transport of a connection's responses. Sends a head together with the first part of its body.

    Sent apart, they cost two system calls, and the client wakes up twice.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._cycle: RequestResponseCycle | None = None  # whose head was not written yet
        self._head = b""  # that waits for its body

    def begin(self, cycle: RequestResponseCycle) -> None:
        """Take what a cycle writes from now on."""
        cycle.transport = self
        self._cycle = cycle

    def write(self, data: Any) -> None:
        """Write the next part. What comes before a response, such as 100 Continue, leaves at once."""
        if self._cycle is not None and self._cycle.response_started:
            self._cycle, self._head = None, data
        elif self._head:
            self._transport.write(b"".join((self._head, data)))
            self._head = b""
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write the head of a response without a body."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        """Close the connection after what was written."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection is being closed."""
        return self._transport.is_closing()


class Parser(httptools.HttpRequestParser):
    """httptools' parser for a server that ignores requests to change the protocol.

    httptools takes everything behind the head of such a request for the other protocol. The client of a
    server that ignores Upgrade sends the body and further requests (RFC 9110, section 7.8).
    """

    def __init__(self, protocol: object, ignore_upgrade: Callable[[bytes], None]) -> None:
        """protocol: has httptools' callbacks. ignore_upgrade: gets the bytes behind a head with Upgrade."""
        super().__init__(protocol)
        # As uvicorn sets it: bytes behind a request that closes the connection do not take its response.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._ignore_upgrade = ignore_upgrade

    def feed_data(self, data: Any) -> None:
        """Parse the next bytes. Raises httptools.HttpParserError."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
