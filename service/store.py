"""Values by key, which expire: what the processes of one server share.

    sessions    histories of conversations
    shared      quotas, findings of verification, locks of sessions, what operators ask of all workers

A server with one process keeps the values in memory (`LocalStore`), several processes of one machine in
SQLite files (`SqliteStore`). With --shared, histories and quotas are kept for all machines (shared/store.py).
Methods are coroutines, so that an implementation may wait for another machine.
Values are bytes, and callers give durations and no points in time, so that machines need not agree on a
clock.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from service.errors import StoreUnavailable

logger = logging.getLogger(__name__)

_FOREVER = float("inf")
# About what an entry takes in memory beside its value.
_ENTRY_BYTES = 300
# How long the event loop waits for another process that writes. Processes write for microseconds.
_LOCKED_SECONDS = 0.25
# After an error the file is left alone for this time, so that requests do not wait one after the other.
_RETRY_SECONDS = 1.0
# A process looks at the bounds after so many writes, and after this share of the bytes that may be kept.
_WRITES_PER_TRIM, _TRIM_SHARE = 64, 1 / 64
_MAX_JOURNAL_BYTES = 4 * 2**20


class Store(Protocol):
    """Values by key. Without `seconds`, a value does not expire. All methods raise StoreUnavailable."""

    async def get(self, key: str, seconds: float | None = None) -> bytes | None:
        """Return the value of a key, or None. seconds: let the value expire so long after now, if given."""

    async def put(self, key: str, value: bytes | None, seconds: float | None = None) -> None:
        """Set the value of a key; None deletes the key."""

    async def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes | None, seconds: float | None = None
    ) -> bool:
        """Set the value of a key if it is `expected`; None: if there is none. Returns whether it was."""

    async def count(self, prefix: str = "") -> int:
        """Return the number of keys that begin with a prefix."""


class LocalStore:
    """Keeps values in this process. Beyond a bound, the least recently used values are dropped."""

    def __init__(
        self,
        max_entries: float = _FOREVER,
        max_bytes: float = _FOREVER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_bytes: of all keys and values, with the overhead of Python's objects."""
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # least recently used first
        self._bytes = 0

    async def get(self, key: str, seconds: float | None = None) -> bytes | None:
        """See Store."""
        expires, value = self._entries.get(key, (0.0, None))
        if value is None or expires <= self._clock():
            return None
        if seconds is not None:
            self._entries[key] = self._clock() + seconds, value
            self._entries.move_to_end(key)
        return value

    async def put(self, key: str, value: bytes | None, seconds: float | None = None) -> None:
        """See Store."""
        if key in self._entries:
            self._drop(key)
        if value is not None:
            self._entries[key] = self._clock() + (_FOREVER if seconds is None else seconds), value
            self._bytes += _bytes_of(key, value)
            self._trim()

    async def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes | None, seconds: float | None = None
    ) -> bool:
        """See Store."""
        if await self.get(key) != expected:
            return False
        await self.put(key, value, seconds)
        return True

    async def count(self, prefix: str = "") -> int:
        """See Store."""
        self._trim()
        now = self._clock()
        return sum(expires > now and key.startswith(prefix) for key, (expires, _) in self._entries.items())

    async def drop_expired(self) -> None:
        """Drop all values that have expired. Without calls, they are kept until something is stored."""
        now = self._clock()
        for key in [key for key, (expires, _) in self._entries.items() if expires <= now]:
            self._drop(key)

    def _trim(self) -> None:
        now = self._clock()
        while self._entries:
            key, (expires, _) = next(iter(self._entries.items()))
            fits = len(self._entries) <= self._max_entries and self._bytes <= self._max_bytes
            if fits and expires > now:
                return
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._bytes -= _bytes_of(key, self._entries.pop(key)[1])


class SqliteStore:
    """Keeps values in an SQLite file for several processes of one machine. Not to be used across a fork.

    A call takes some 20 microseconds and blocks the event loop, which is less than to hand the call to a
    thread. The file does not outlive the server, so nothing is flushed to the disk.
    """

    def __init__(self, path: Path, max_entries: float = _FOREVER, max_bytes: float = _FOREVER) -> None:
        """max_bytes: each process may exceed it by a 64th and one value. Raises StoreUnavailable."""
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._retry_at = 0.0
        self._why = ""
        self._writes = self._written = 0  # since the last look at the bounds
        try:
            # No transaction is open between calls.
            self._connection = sqlite3.connect(
                path, timeout=_LOCKED_SECONDS, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._run("PRAGMA journal_mode = WAL")
        self._run("PRAGMA synchronous = OFF")
        self._run(f"PRAGMA journal_size_limit = {_MAX_JOURNAL_BYTES}")
        self._run(
            "CREATE TABLE IF NOT EXISTS entries "
            "(key TEXT PRIMARY KEY, value BLOB, expires REAL, used REAL, bytes INTEGER)"
        )
        # Counting and dropping read the index alone, and no value.
        self._run("CREATE INDEX IF NOT EXISTS entries_used ON entries (used, expires, key, bytes)")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    async def get(self, key: str, seconds: float | None = None) -> bytes | None:
        """See Store."""
        now = time.monotonic()
        found = self._run("SELECT value FROM entries WHERE key = ? AND expires > ?", key, now).fetchone()
        if found is not None and seconds is not None:
            self._run("UPDATE entries SET expires = ?, used = ? WHERE key = ?", now + seconds, now, key)
        return None if found is None else found[0]

    async def put(self, key: str, value: bytes | None, seconds: float | None = None) -> None:
        """See Store."""
        if value is None:
            self._run("DELETE FROM entries WHERE key = ?", key)
            return
        now = time.monotonic()
        expires = now + (_FOREVER if seconds is None else seconds)
        columns = "(key, value, expires, used, bytes) VALUES (?, ?, ?, ?, ?)"
        self._run(f"INSERT OR REPLACE INTO entries {columns}", key, value, expires, now, len(value))
        self._writes += 1
        self._written += len(value)
        if self._writes >= _WRITES_PER_TRIM or self._written > self._max_bytes * _TRIM_SHARE:
            self._writes = self._written = 0
            await self._trim()

    async def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes | None, seconds: float | None = None
    ) -> bool:
        """See Store."""
        self._run("BEGIN IMMEDIATE")
        try:
            # Neither of the two waits, so nothing else of this process comes between.
            if await self.get(key) != expected:
                return False
            await self.put(key, value, seconds)
            self._run("COMMIT")
            return True
        finally:
            if self._connection.in_transaction:
                # The error that ended the transaction says more than one of its end.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.rollback()

    async def count(self, prefix: str = "") -> int:
        """See Store."""
        query = "SELECT COUNT(*) FROM entries WHERE substr(key, 1, ?) = ? AND expires > ?"
        return int(self._run(query, len(prefix), prefix, time.monotonic()).fetchone()[0])

    async def drop_expired(self) -> None:
        """Drop all values that have expired. Without calls, they are kept until much is stored.

        Raises StoreUnavailable.
        """
        expired = "SELECT key FROM entries WHERE expires <= ?"
        self._run(f"DELETE FROM entries WHERE key IN ({expired})", time.monotonic())

    async def _trim(self) -> None:
        await self.drop_expired()
        of_one = f"LENGTH(key) + bytes + {_ENTRY_BYTES}"
        totals = self._run(f"SELECT COUNT(*), TOTAL({of_one}) FROM entries").fetchone()
        if totals[0] > self._max_entries or totals[1] > self._max_bytes:
            numbered = (
                f"SELECT key, ROW_NUMBER() OVER latest AS number, SUM({of_one}) OVER latest AS total "
                "FROM entries WINDOW latest AS (ORDER BY used DESC)"
            )
            excess = f"SELECT key FROM ({numbered}) WHERE number > ? OR total > ?"
            self._run(f"DELETE FROM entries WHERE key IN ({excess})", self._max_entries, self._max_bytes)

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if time.monotonic() < self._retry_at:
            raise self._unavailable()
        try:
            return self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> StoreUnavailable:
        # SQLite's messages, such as "database or disk is full", hold no key and no value.
        self._why = str(error)
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        logger.error("the file that the workers share cannot be used: %s", self._why)
        return self._unavailable()

    def _unavailable(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"the file that the server's worker processes share cannot be used ({self._why}); "
            "send the request again",
        )


def _bytes_of(key: str, value: bytes) -> int:
    return len(key) + len(value) + _ENTRY_BYTES
