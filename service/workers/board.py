"""What workers know of each other all the time: a few numbers per worker, in memory that they share.

Each worker writes its own numbers, and the supervisor clears the numbers of a worker that has ended. A number
is written as a whole, so nobody needs a lock.
"""

from __future__ import annotations

import mmap
import time

_ALL_STARTED, _ALL_END = range(2)
_FIRST, _PER_WORKER = 2, 4
_SERVES, _CONNECTIONS, _DRAINED, _WRITTEN_AT = range(_PER_WORKER)
# A worker whose event loop has not written for so long gets no new connections while others serve.
_SILENT_NS = 2 * 10**9


class Board:
    """Numbers that the supervisor and all workers see. Made by the supervisor, before it starts a worker."""

    def __init__(self, count: int) -> None:
        """count: of workers."""
        self._count = count
        self._cells = memoryview(mmap.mmap(-1, 8 * (_FIRST + count * _PER_WORKER))).cast("q")

    @property
    def all_started(self) -> bool:
        """Whether every worker has been ready once."""
        return bool(self._cells[_ALL_STARTED])

    def set_all_started(self) -> None:
        """Note that every worker has been ready once."""
        self._cells[_ALL_STARTED] = 1

    @property
    def all_end(self) -> bool:
        """Whether all workers were told to end, and not this one alone."""
        return bool(self._cells[_ALL_END])

    def set_all_end(self) -> None:
        """Note that all workers are told to end. Called before they are."""
        self._cells[_ALL_END] = 1

    def write(self, worker: int, *, serves: bool, connections: int, drained: bool = False) -> None:
        """Write the numbers of a worker.

        serves: whether it is ready to answer. drained: whether it ends, and has nothing left to answer.
        """
        first = _FIRST + worker * _PER_WORKER
        self._cells[first + _SERVES] = serves
        self._cells[first + _CONNECTIONS] = connections
        self._cells[first + _DRAINED] = drained
        self._cells[first + _WRITTEN_AT] = time.monotonic_ns()

    def add_connection(self, worker: int) -> None:
        """Count a connection that a worker has just accepted, until the worker writes again."""
        self._cells[_FIRST + worker * _PER_WORKER + _CONNECTIONS] += 1

    def clear(self, worker: int) -> None:
        """Note that a worker has ended."""
        first = _FIRST + worker * _PER_WORKER
        self._cells[first + _SERVES] = 0
        self._cells[first + _WRITTEN_AT] = 0

    def others_should_accept(self, worker: int) -> bool:
        """Return whether another worker should take the next connection.

        This is a worker with fewer connections, or any worker that serves if this one does not.
        """
        others = [self._connections(other) for other in range(self._count) if other != worker]
        mine = self._connections(worker)
        return any(theirs is not None and (mine is None or theirs < mine) for theirs in others)

    def serves(self, worker: int) -> bool:
        """Return whether a worker is ready to answer."""
        return self._connections(worker) is not None

    def others_are_drained(self, worker: int) -> bool:
        """Return whether no other worker has anything left to answer, or will ever answer it."""
        return all(
            self._cells[_FIRST + other * _PER_WORKER + _DRAINED] or self._is_silent(other)
            for other in range(self._count)
            if other != worker
        )

    def _connections(self, worker: int) -> int | None:
        """Return the number of connections of a worker that serves, else None."""
        first = _FIRST + worker * _PER_WORKER
        serves = self._cells[first + _SERVES] and not self._is_silent(worker)
        return self._cells[first + _CONNECTIONS] if serves else None

    def _is_silent(self, worker: int) -> bool:
        """Return whether a worker has ended, hangs, or has not started."""
        return time.monotonic_ns() - self._cells[_FIRST + worker * _PER_WORKER + _WRITTEN_AT] > _SILENT_NS
