"""Messages between workers, over Unix sockets in a folder that only the server's user may open.

    a message     4 bytes: length of the fields, 4 bytes: length of the body; fields in JSON; body
    a connection  one question, its answer, the next question ...

Whoever asks and does not want the answer any more closes the connection, and the other side is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from service.errors import WorkerUnavailable, log_failure

logger = logging.getLogger(__name__)

_LENGTHS = struct.Struct(">II")
_MOST_IDLE = 64


class Message(NamedTuple):
    """A question or an answer."""

    fields: dict[str, Any]
    body: bytes = b""


# Returns the answer to a question. The event is set if nobody waits for the answer any more.
Answering = Callable[[Message, asyncio.Event], Awaitable[Message]]


async def listen(path: Path, answering: Answering) -> asyncio.Server:
    """Answer the messages that arrive at this Unix socket. A file that was left over there is replaced."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The event loop cancels what still runs when it ends.
        ends = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends), contextlib.closing(writer):
            while True:
                question = await _read(reader)
                answer = await _answered(question, answering, reader)
                if answer is None:
                    return
                await _write(writer, answer)

    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return await asyncio.start_unix_server(converse, os.fspath(path))


class Peer:
    """The way to another worker. Used on the event loop."""

    def __init__(self, path: Path) -> None:
        """path: the Unix socket of the worker."""
        self._path = path
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()

    async def ask(self, question: Message) -> Message:
        """Return the answer of the worker. If the caller is cancelled, the worker is told.

        Raises WorkerUnavailable if the worker does not run, or ends before it has answered.
        """
        try:
            reader, writer = await self._connected()
            try:
                await _write(writer, question)
                answer = await _read(reader)
            except BaseException:
                writer.close()
                raise
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerUnavailable(
                "a worker process of the server does not run at present; send the request again",
                retry_after_seconds=1,
            ) from error
        if len(self._idle) < _MOST_IDLE:
            self._idle.append((reader, writer))
        else:
            writer.close()
        return answer

    def close(self) -> None:
        """Close the connections that wait for the next question."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_unix_connection(os.fspath(self._path))


async def _answered(question: Message, answering: Answering, reader: asyncio.StreamReader) -> Message | None:
    """Return the answer to a question; None if there is none, or nobody wants it any more."""
    gone = asyncio.Event()

    async def watch() -> None:
        # Nothing is sent before the answer, so this is the end of the connection, or its reset.
        with contextlib.suppress(OSError):
            await reader.read(1)
        gone.set()

    watching = asyncio.create_task(watch())
    try:
        answer = await answering(question, gone)
    except Exception as error:
        log_failure(logger, "a message of another worker was not answered", error)
        return None
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    return None if gone.is_set() else answer


async def _read(reader: asyncio.StreamReader) -> Message:
    fields, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    return Message(orjson.loads(await reader.readexactly(fields)), await reader.readexactly(body))


async def _write(writer: asyncio.StreamWriter, message: Message) -> None:
    fields = orjson.dumps(message.fields)
    writer.write(_LENGTHS.pack(len(fields), len(message.body)) + fields + message.body)
    await writer.drain()
