"""The quotas of API keys over all workers: a key may ask for as much as of a server with one process.

What a key has used stands in a file per key, in the private folder of the workers. Whoever counts locks the
file, for some microseconds. The system unlocks the files of a worker that ends, and the supervisor takes out
the requests that were in flight there.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.web.quotas import Quotas, QuotaUse

# Level and time of the two buckets; behind them, for each worker, the requests in flight.
_BUCKETS = struct.Struct("=4d")
_IN_FLIGHT = struct.Struct("=q")


class SharedQuotaUse(QuotaUse):
    """Counts what one key asks for, together with the other workers."""

    def __init__(self, folder: Path, name: str, quotas: Quotas, worker: int, count: int) -> None:
        """folder: of all quotas. name: of the key's holder. worker: this one, of `count` workers."""
        super().__init__(quotas)
        self._cells = struct.Struct(f"{_BUCKETS.format}{count}q")
        self._in_flight_at = _BUCKETS.size + worker * _IN_FLIGHT.size
        # With other quotas, everything is counted from the beginning.
        known_by = ".".join(str(amount) for amount in (quotas.requests_per_minute, quotas.tokens_per_minute))
        # A name begins with no dot and has no slash.
        path = folder / f"{name}.{known_by}.{quotas.in_flight}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __del__(self) -> None:
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
        buckets = [self._requests, self._tokens]
        fcntl.flock(self._file, fcntl.LOCK_EX)
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
            fcntl.flock(self._file, fcntl.LOCK_UN)


def forget_in_flight(folder: Path, worker: int) -> None:
    """Take out the requests of a worker that has ended."""
    for path in folder.iterdir():
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            at = _BUCKETS.size + worker * _IN_FLIGHT.size
            if os.fstat(file.fileno()).st_size > at:
                os.pwrite(file.fileno(), _IN_FLIGHT.pack(0), at)


def _add(file: int, at: int, change: int) -> None:
    (value,) = _IN_FLIGHT.unpack(os.pread(file, _IN_FLIGHT.size, at))
    os.pwrite(file, _IN_FLIGHT.pack(value + change), at)
