"""The sessions of the server: the history of each session, and whose turn it is.

begin -> (wait for the request before) -> history -> compute -> keep -> end
                                                             -> end, if the request failed

A history is found until it was not accessed for a while, or until histories take too much memory.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from attncache_core.reuse.kv.capacity import DistinctSessions
from service.conversations.conversation import History
from service.errors import QueueFull

Session = tuple[bytes, str]  # salt and id: clients of one salt never meet the sessions of another salt
# Room for 16 million tokens.
CAPACITY_BYTES = 64 * 2**20
# One session may have this share of the capacity, so that it does not push out all others.
_MOST_OF_ONE = 1 / 16


class Sessions:
    """Owns the histories of sessions, in memory. Used on the event loop only."""

    def __init__(
        self,
        *,
        ttl_seconds: float,
        most_sessions: int,
        most_waiting: int,
        capacity_bytes: int = CAPACITY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ttl_seconds: how long a history is kept after its last access.

        most_sessions, capacity_bytes: the most sessions, and the bytes of their histories with the overhead
        of Python's objects; the least recently used histories are dropped. most_waiting: the most requests
        that may wait for another request of their session.
        """
        self._ttl_seconds = ttl_seconds
        self._most_sessions = most_sessions
        self._most_waiting = most_waiting
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._bytes = 0
        self._histories: OrderedDict[Session, tuple[float, History]] = OrderedDict()  # oldest access first
        # For each session with requests their turns, in order; the first is done and runs.
        self._turns: dict[Session, deque[asyncio.Future[None]]] = {}
        self._waiting = 0
        self._distinct = DistinctSessions(ttl_seconds, clock)

    @property
    def count(self) -> int:
        """The number of sessions with a history."""
        self._forget_expired()
        return len(self._histories)

    @property
    def distinct(self) -> int:
        """The number of distinct sessions that were used within the time to live, also of dropped ones."""
        return self._distinct.count()

    def begin(self, session: Session) -> asyncio.Future[None]:
        """Return a future that is done when no earlier request of the session runs.

        The caller calls `end` in any case, also after an exception while it waits. Raises QueueFull.
        """
        turns = self._turns.get(session)
        if turns and self._waiting >= self._most_waiting:
            raise QueueFull("too many requests wait for their session", retry_after_seconds=1)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if turns:
            self._waiting += 1
            turns.append(turn)
        else:
            self._turns[session] = deque([turn])
            turn.set_result(None)
        return turn

    def end(self, session: Session, turn: asyncio.Future[None]) -> None:
        """Let the next request of the session run."""
        turns = self._turns[session]
        turns.remove(turn)
        if not turns:
            del self._turns[session]
            return
        self._waiting -= 1
        # If a client left while it waited, its turn is done already, and its own `end` follows.
        if not turns[0].done():
            turns[0].set_result(None)

    def history(self, session: Session) -> History | None:
        """Return the history of a session, None if there is none. Counts as an access."""
        self._forget_expired()
        if session not in self._histories:
            return None
        history = self._histories[session][1]
        self._histories[session] = self._clock(), history
        self._histories.move_to_end(session)
        return history

    def keep(self, session: Session, history: History) -> None:
        """Keep what the history of a session has become. Counts as an access.

        A history that is too long is dropped.
        """
        if session in self._histories:
            self._drop(session)
        if _bytes_of(session, history) > self._capacity_bytes * _MOST_OF_ONE:
            return
        self._histories[session] = self._clock(), history
        self._bytes += _bytes_of(session, history)
        # The hash, because ids may be long, and the count of distinct sessions remembers them.
        self._distinct.used(hash(session))
        while len(self._histories) > self._most_sessions or self._bytes > self._capacity_bytes:
            self._drop(next(iter(self._histories)))

    def _forget_expired(self) -> None:
        earliest = self._clock() - self._ttl_seconds
        while self._histories:
            session, (last_access, _) = next(iter(self._histories.items()))
            if last_access > earliest:
                return
            self._drop(session)

    def _drop(self, session: Session) -> None:
        _, history = self._histories.pop(session)
        self._bytes -= _bytes_of(session, history)


def _bytes_of(session: Session, history: History) -> int:
    # 300 bytes for the entry in the dictionary, and for the objects of fixed size.
    return sum(map(sys.getsizeof, (*session, history.turns, *history.turns))) + 300
