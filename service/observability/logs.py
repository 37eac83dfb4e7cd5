"""Log lines as text or as JSON, with the id of the request that they are about.

No log line holds a text, an API key, a path of a client's choice or a query.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from service.ending import nonblocking
from service.observability.finished import FinishedRequest

LogFormat = Literal["text", "json"]
# The request that is being answered: in its task, and in the threads that the task waits for.
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)

_ACCESS_LOGGER = "service.access"
# For a pipe that is full, until a line is dropped: of any thread, and of the thread of the access log.
_SECONDS, _ACCESS_SECONDS = 0.05, 1.0
# An attribute of log records: the requests that the lines of the record are about.
_REQUESTS = "answered_requests"


class LogHandler(logging.Handler):
    """Writes lines to standard error. While nobody reads them, they are dropped: no thread waits for long."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stderr
        self._file: int | None = None  # None: standard error is no file, as in tests
        with contextlib.suppress(OSError, ValueError):
            self._file = nonblocking(self._stream.fileno())
        self._dropped = 0  # lines
        self._is_torn = False  # whether only the beginning of the last line was written

    def close(self) -> None:
        """Close what was opened."""
        super().close()
        if self._file is not None and self._file != self._stream.fileno():
            os.close(self._file)
            self._file = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record, without a lock: others write while the thread of the access log waits."""
        is_logged = bool(self.filter(record))
        if is_logged:
            self.emit(record)
        return is_logged

    def emit(self, record: logging.LogRecord) -> None:
        """Write the lines of a record, and before them how many lines were dropped."""
        try:
            told = lines = self.format(record)
            if self._dropped:
                missing = "%d lines are missing: they could not be written"
                warning = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
                lost = logging.makeLogRecord(warning | {"msg": missing, "args": (self._dropped,)})
                told = f"{self.format(lost)}\n{lines}"
            if self._is_torn:
                told = f"\n{told}"
            patience = _ACCESS_SECONDS if _answered(record) else _SECONDS
            left = self._write(f"{told}\n", 0.0 if self._dropped else patience)
            self._dropped = self._dropped + min(left, lines.count("\n") + 1) if left else 0
        except Exception:
            self.handleError(record)

    def _write(self, lines: str, seconds: float) -> int:
        """Write lines, each part within some seconds. Return how many lines were not written."""
        if self._file is None:
            self._stream.write(lines)
            return 0
        content = lines.encode(errors="backslashreplace")
        for part in _parts(content):
            rest = _written(self._file, part, seconds)
            if len(rest) < len(part):
                self._is_torn = not part[: len(part) - len(rest)].endswith(b"\n")
            if rest:
                return content.count(b"\n")
            content = content[len(part) :]
        return 0


def _written(file: int, part: bytes, seconds: float) -> bytes:
    """Write a part. Return the rest that was not written, because nobody reads it, or a disk is full."""
    last = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while part and select.select([], [file], [], max(0.0, last - time.monotonic()))[1]:
            with contextlib.suppress(BlockingIOError):  # another process was faster
                part = part[os.write(file, part) :]
    return part


def _parts(lines: bytes) -> Iterator[bytes]:
    """Divide lines into parts that a pipe takes as a whole. Only a line that is longer is divided."""
    while len(lines) > select.PIPE_BUF:
        end = lines.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
        yield lines[:end]
        lines = lines[end:]
    yield lines


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Log messages of this level and above to stderr, one line per message as far as they have one line."""
    handler = LogHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Python's warnings would otherwise be lines of another format.
    logging.captureWarnings(True)
    # uvicorn logs every step of start and stop, and the server logs these steps itself. It also warns of each
    # request that is no HTTP, which the metrics count: clients must not be able to fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # Faiss logs which of its builds it does not find, which reads like a broken installation.
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)
    # --access-log asks for these lines, whatever the level of the others.
    logging.getLogger(_ACCESS_LOGGER).setLevel(logging.INFO)


class TextFormatter(logging.Formatter):
    """Time, level, logger and message; then what else the line tells, as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return a line, or a line for each request of the access log."""
        if requests := _answered(record):
            return "\n".join(self._access_line(request) for request in requests)
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without an exception's stack."""
        request_id = REQUEST_ID.get()
        about = "" if request_id is None else f" request_id={request_id}"
        return super().formatMessage(record) + about

    def _access_line(self, request: FinishedRequest) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields_of(request).items())
        at = time.strftime(self.default_time_format, time.localtime(request.ended_at))
        milliseconds = int(request.ended_at % 1 * 1000)
        return f"{at},{milliseconds:03d} INFO {_ACCESS_LOGGER}: {_message_of(request)} {fields}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, message, and what else it tells."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line, or a line for each request of the access log."""
        if requests := _answered(record):
            return "\n".join(map(self._access_line, requests))
        line = _json_line(record.created, record.levelname.lower(), record.name, _valid(record.getMessage()))
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = _valid(self.formatException(record.exc_info))
        return orjson.dumps(line).decode()

    def _access_line(self, request: FinishedRequest) -> str:
        line = _json_line(request.ended_at, "info", _ACCESS_LOGGER, _message_of(request))
        return orjson.dumps({**line, **_fields_of(request)}).decode()


def log_access(requests: Sequence[FinishedRequest]) -> None:
    """Log the lines of --access-log about requests."""
    # One record for all of them, because a record takes ten times as long as a line.
    logging.getLogger(_ACCESS_LOGGER).info(
        "%d requests were answered", len(requests), extra={_REQUESTS: requests}
    )


def _answered(record: logging.LogRecord) -> Sequence[FinishedRequest]:
    return getattr(record, _REQUESTS, ())


def _json_line(at: float, level: str, logger: str, message: str) -> dict[str, Any]:
    shown = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return {"time": shown, "level": level, "logger": logger, "message": message}


def _message_of(request: FinishedRequest) -> str:
    return f"{request.method} {request.route} {request.status}"


def _fields_of(request: FinishedRequest) -> dict[str, Any]:
    fields = {
        "request_id": request.request_id,
        "method": request.method,
        "route": request.route,
        "status": request.status,
        "seconds": round(request.ended - request.started, 6),
        "sequences": request.sequences,
        "tokens": request.tokens,
        "cached_tokens": request.cached_tokens,
        "repeated": request.repeated,
    }
    if request.key is not None:
        fields["key"] = request.key
    return fields


def _valid(text: str) -> str:
    """Return the text without lone surrogates, which stand for bytes of file names that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()
