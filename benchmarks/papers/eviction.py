"""The orders that CachedAttention compares its look-ahead eviction with: LRU and FIFO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attncache_core.reuse.kv.eviction import Item, LookAhead


class Lru(LookAhead[Item]):
    """Evict the least recently used item first. An item that was never used is as old as its addition."""

    def expect(self, upcoming: Sequence[Item]) -> None:
        """Ignore the queue: the age of an item depends on the past alone."""


class Fifo(Lru[Item]):
    """Evict the item first that has been in the tier for the longest time."""

    def used(self, item: Item) -> None:
        """Keep the order. Raises KeyError if the tier does not hold the item."""
        if item not in self._outside:
            raise KeyError(item)


# The name of an order in the options -> its class.
EVICTION: dict[str, type[LookAhead[Any]]] = {"lru": Lru, "fifo": Fifo, "look-ahead": LookAhead}
