"""The quotas of API keys over all workers: a key may ask for as much as of a server with one process.

What a key has used stands in a file per key, in the private folder of the workers. Whoever counts locks the
file, for some microseconds. The system unlocks the files of a worker that ends, and the supervisor takes out
the requests that were in flight there. A worker that is stopped while it has the lock keeps it. The others
count without the lock then, and two that count at the same time may lose requests and tokens of one of them.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from service.access.quotas import Quotas, QuotaUse
from service.errors import InvalidSettings

# Level and time of the two buckets; behind them, for each worker, the requests in flight.
_BUCKETS = struct.Struct("=4d")
_IN_FLIGHT = struct.Struct("=q")
# The event loop waits while others have the lock.
_MOST_TRIES, _BETWEEN_TRIES_SECONDS = 100, 0.0001


class SharedQuotaUse(QuotaUse):
    """Counts what one key asks for, together with the other workers."""

    def __init__(self, folder: Path, name: str, quotas: Quotas, worker: int, count: int) -> None:
        """folder: of all quotas. name: of the key's holder. worker: this one, of `count` workers.

        Raises InvalidSettings if the system opens no file.
        """
        super().__init__(quotas)
        self._file: int | None = None
        self._tries = _MOST_TRIES
        self._cells = struct.Struct(f"{_BUCKETS.format}{count}q")
        self._in_flight_at = _BUCKETS.size + worker * _IN_FLIGHT.size
        # With other quotas, everything is counted from the beginning.
        known_by = ".".join(str(amount) for amount in (quotas.requests_per_minute, quotas.tokens_per_minute))
        # A name begins with no dot and has no slash.
        path = folder / f"{name}.{known_by}.{quotas.in_flight}"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InvalidSettings(
                f"the quotas of {name} cannot be counted: {reason}", field="api_keys"
            ) from error

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def begin(self) -> None:
        """Count a request that begins; see QuotaUse."""
        with self._counting_together():
            super().begin()

    def end(self, tokens: int) -> None:
        """Count the end of a request; see QuotaUse."""
        with self._counting_together():
            super().end(tokens)

    @contextmanager
    def _counting_together(self) -> Iterator[None]:
        """Let the block see, and change, what all workers have counted."""
        assert self._file is not None
        buckets = [self._requests, self._tokens]
        is_locked = self._lock(self._file)
        try:
            content = os.pread(self._file, self._cells.size, 0)
            if content:
                cells = self._cells.unpack(content)
                for bucket, level, refilled_at in zip(buckets, cells[:4:2], cells[1:4:2], strict=True):
                    if bucket is not None:
                        bucket.level, bucket.refilled_at = level, refilled_at
                self._in_flight = sum(cells[4:])
            else:
                os.ftruncate(self._file, self._cells.size)
            before = self._in_flight
            try:
                yield
            finally:
                levels = [
                    number
                    for bucket in buckets
                    for number in ((bucket.level, bucket.refilled_at) if bucket is not None else (0.0, 0.0))
                ]
                os.pwrite(self._file, _BUCKETS.pack(*levels), 0)
                _add(self._file, self._in_flight_at, self._in_flight - before)
        finally:
            if is_locked:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self, file: int) -> bool:
        """Lock the file. Returns whether that has succeeded soon enough."""
        for number in range(self._tries):
            if number:
                time.sleep(_BETWEEN_TRIES_SECONDS)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._tries = _MOST_TRIES
                return True
        # Whoever has the lock is stopped, and would otherwise delay each request.
        self._tries = 1
        return False


def forget_in_flight(folder: Path, worker: int) -> None:
    """Take out the requests of a worker that has ended."""
    at = _BUCKETS.size + worker * _IN_FLIGHT.size
    for path in folder.iterdir():
        # Without the lock, because nobody else writes this number.
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size > at:
                os.pwrite(file.fileno(), _IN_FLIGHT.pack(0), at)


def _add(file: int, at: int, change: int) -> None:
    (value,) = _IN_FLIGHT.unpack(os.pread(file, _IN_FLIGHT.size, at))
    os.pwrite(file, _IN_FLIGHT.pack(value + change), at)
