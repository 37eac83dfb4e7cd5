"""The sessions of the server: the history of each session, and whose turn it is.

begin -> (wait for the request before) -> lock -> history -> compute -> keep -> end
                                                                     -> end, if the request failed

A history is found until it was not accessed for a while, or until histories take too much memory. Requests of
one session take turns: in one process by `begin`, in the order of their arrival, and over several processes
of a machine by `lock`. Other machines change a history meanwhile: `keep` notices that, and the request is
computed again, behind what they have added.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from attncache_core.reuse.kv.capacity import DistinctSessions
from service.conversations.conversation import History
from service.errors import QueueFull, StoreUnavailable
from service.store import Store

Session = tuple[bytes, str]  # salt and id: clients of one salt never meet the sessions of another salt
# What has become of a history: kept, dropped, or not kept because the session has another one meanwhile.
Kept = Literal["kept", "dropped", "changed"]
# Room for 16 million tokens.
CAPACITY_BYTES = 64 * 2**20
# One session may have this share of the capacity, so that it does not push out all others.
_MAX_OF_ONE = 1 / 16
_MAX_OUTDATED = 100_000


class Sessions:
    """Owns the histories of sessions. Used on the event loop only."""

    def __init__(
        self,
        histories: Store,
        locks: Store,
        process: str = "0",
        *,
        ttl_seconds: float,
        max_waiting: int,
        max_seconds: float,
        capacity_bytes: int = CAPACITY_BYTES,
        others_write: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """histories: a store for histories alone, which drops some beyond its bounds. locks: a store.

        process: the name of this process among those that share the stores. ttl_seconds: how long a history
        is kept after its last access. capacity_bytes: of `histories`. max_waiting: the most requests that
        may wait for another request of their session. max_seconds: that a request may take, after which its
        lock ends, even if this process could not unlock the session. others_write: whether other machines
        write histories too, without these locks: a history may have got more turns before it was dropped.
        """
        self._histories = histories
        self._locks = locks
        self._process = process.encode()
        self._ttl_seconds = ttl_seconds
        self._max_waiting = max_waiting
        self._max_seconds = max_seconds
        self._capacity_bytes = capacity_bytes
        self._others_write = others_write
        # For each session with requests their turns, in order; the first is done and runs.
        self._turns: dict[Session, deque[asyncio.Future[None]]] = {}
        self._waiting = 0
        self._outdated: OrderedDict[str, float] = OrderedDict()  # times by key; see `outdate`
        self._distinct = DistinctSessions(ttl_seconds, clock)

    async def count(self) -> int:
        """Return the number of sessions with a history."""
        return await self._histories.count()

    @property
    def distinct(self) -> int:
        """The number of distinct sessions used here within the time to live, also of dropped ones."""
        return self._distinct.count()

    def begin(self, session: Session) -> asyncio.Future[None]:
        """Return a future that is done when no earlier request of the session runs.

        The caller calls `end` in any case, also after an exception while it waits. Raises QueueFull.
        """
        turns = self._turns.get(session)
        if turns and self._waiting >= self._max_waiting:
            raise QueueFull("too many requests wait for their session")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if turns:
            self._waiting += 1
            turns.append(turn)
        else:
            self._turns[session] = deque([turn])
            turn.set_result(None)
        return turn

    async def lock(self, session: Session) -> bool:
        """Try to lock a session for the request whose turn it is. Returns whether `unlock` must follow.

        Returns False while a request of another process has the lock. If the locks cannot be used, nobody
        waits for them, and `keep` notices what another process has changed.
        """
        key = f"lock/{_name_of(session)}"
        with suppress(StoreUnavailable):
            if await self._locks.compare_and_set(key, None, self._process, self._max_seconds):
                return True
            holder = await self._locks.get(key)
            if holder is None:
                return False
            if holder != self._process and await self._locks.get(f"alive/{holder.decode()}") is not None:
                return False
            # The other process has ended, or this one could not unlock the session before.
            return await self._locks.compare_and_set(key, holder, self._process, self._max_seconds)
        return True

    async def unlock(self, session: Session) -> None:
        """Unlock a session that `lock` has locked for the request whose turn it is."""
        with suppress(StoreUnavailable):
            await self._locks.compare_and_set(f"lock/{_name_of(session)}", self._process, None)

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

    async def history(self, session: Session) -> bytes | None:
        """Return the history of a session as it is stored; None if there is none. Counts as an access.

        Raises StoreUnavailable.
        """
        key = _name_of(session)
        await self._remove_outdated(key)
        return await self._histories.get(key, self._ttl_seconds)

    def outdate(self, session: Session, arrived: float) -> None:
        """Let the stored history of a session be found no more, because a transcript could not be kept.

        arrived: when the transcript arrived, seconds since 1970. A history that began before that time is
        removed before it would be read here, or by `remove_outdated`.
        """
        key = _name_of(session)
        self._outdated[key] = max(arrived, self._outdated.get(key, arrived))
        if len(self._outdated) > _MAX_OUTDATED:
            self._outdated.popitem(last=False)

    async def remove_outdated(self) -> None:
        """Remove histories that must not be found any more. Raises StoreUnavailable."""
        for key in list(self._outdated):
            await self._remove_outdated(key)

    async def _remove_outdated(self, key: str) -> None:
        while (arrived := self._outdated.get(key)) is not None:
            stored = await self._histories.get(key)
            is_gone = (
                stored is None
                or _begun(stored) >= arrived
                or await self._histories.compare_and_set(key, stored, None)
            )
            # Meanwhile, a later transcript may have been noted.
            if is_gone and self._outdated.get(key) == arrived:
                del self._outdated[key]

    async def keep(self, session: Session, before: bytes | None, history: History) -> Kept:
        """Keep what the history of a session has become. Counts as an access.

        before: what `history` has returned. A history that is too long is dropped. It is not kept if the
        session has another history than `before` meanwhile, or, where other machines write, none any more.
        Raises StoreUnavailable.
        """
        key, content = _name_of(session), history.written()
        kept = None if len(content) > self._capacity_bytes * _MAX_OF_ONE else content
        # The hash, because ids may be long, and the count of distinct sessions remembers them.
        self._distinct.used(hash(session))
        set_if = self._histories.compare_and_set
        is_set = await set_if(key, before, kept, self._ttl_seconds)
        if not is_set and before is not None and not self._others_write:
            # The history of before may have been dropped meanwhile.
            is_set = await set_if(key, None, kept, self._ttl_seconds)
        if not is_set:
            return "changed"
        self._outdated.pop(key, None)
        return "dropped" if kept is None else "kept"


def _begun(content: bytes) -> float:
    """Return when a stored history began; 0 if it cannot be read."""
    try:
        return History.read(content).begun
    except ValueError:
        return 0.0


def _name_of(session: Session) -> str:
    """Return the key of a session in stores, which holds nothing that a client has sent."""
    salt, name = session
    return hashlib.blake2b(b"%d %b%b" % (len(salt), salt, name.encode()), digest_size=16).hexdigest()
