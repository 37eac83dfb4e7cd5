"""Sizes of the key-value store: capacity and its price.

The symbols are those of CachedAttention: C_mem, C_disk (section 3.3), DSpUT, CCpS, CCpUT and RCC (4.3.6).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass

_BYTES_PER_GB = 10**9


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What a store can hold, compared with what its sessions need (section 4.3.6).

    The unit of time of `distinct_sessions` is the time to live of an entry. A GB is 10⁹ bytes.
    """

    bytes_per_token: int
    context_window: int  # tokens
    memory_bytes: int  # C_mem
    disk_bytes: int  # C_disk
    distinct_sessions: int  # DSpUT: the maximum number of distinct sessions per unit of time
    memory_price: float | None = None  # $ per GB and hour
    disk_price: float | None = None  # $ per GB and hour

    def figures(self) -> dict[str, float | None]:
        """Return the plan and what follows from it, by name.

        session_bytes: CCpS, of a session that fills the context window. memory_sessions, disk_sessions,
        sessions: that fit into memory, on disk, and into both together. full_bytes: CCpUT, at which every
        session of a unit of time stays in the store. capacity_ratio: RCC / CCpUT, with the capacity of both
        tiers as RCC; None without sessions. The paper measures a hit rate of 51 % at a ratio of 0.1, and of
        98 % at 0.25. memory_cost, disk_cost, cost: $ per hour, of the tiers and of both; None if a price is
        not given.
        """
        session_bytes = self.context_window * self.bytes_per_token
        capacity = self.memory_bytes + self.disk_bytes
        full_bytes = self.distinct_sessions * session_bytes
        memory_cost, disk_cost = (
            None if price is None else price * size / _BYTES_PER_GB
            for size, price in ((self.memory_bytes, self.memory_price), (self.disk_bytes, self.disk_price))
        )
        return {
            **asdict(self),
            "session_bytes": session_bytes,
            "memory_sessions": self.memory_bytes // session_bytes,
            "disk_sessions": self.disk_bytes // session_bytes,
            "sessions": capacity // session_bytes,
            "full_bytes": full_bytes,
            "capacity_ratio": capacity / full_bytes if full_bytes else None,
            "memory_cost": memory_cost,
            "disk_cost": disk_cost,
            "cost": None if memory_cost is None or disk_cost is None else memory_cost + disk_cost,
        }


class DistinctSessions:
    """Count the distinct sessions of the last `window_seconds`: the current value of DSpUT.

    It holds one entry per counted session, and counts no more than MAX sessions. The class is not
    thread-safe.
    """

    MAX = 2**18

    def __init__(self, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._last_use: OrderedDict[Hashable, float] = OrderedDict()  # session -> seconds, oldest first

    def used(self, session: Hashable) -> None:
        """Record that `session` is used now."""
        self._last_use[session] = self._clock()
        self._last_use.move_to_end(session)
        if len(self._last_use) > self.MAX:
            self._last_use.popitem(last=False)
        self._forget_old()

    def count(self) -> int:
        """Return the number of sessions that were used less than `window_seconds` ago."""
        self._forget_old()
        return len(self._last_use)

    def _forget_old(self) -> None:
        earliest = self._clock() - self._window_seconds
        while self._last_use and next(iter(self._last_use.values())) <= earliest:
            self._last_use.popitem(last=False)
