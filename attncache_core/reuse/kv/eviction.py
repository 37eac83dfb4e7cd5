"""Eviction policies: choose the item that leaves a full tier of the key-value store.

    added, used, removed    the tier reports what happens to its items
    expect                  the queue reports the items that waiting requests will use
    victim                  the policy names the item that should leave the tier next

A policy serves one tier. It holds item names only: block keys, or session numbers in a simulation. It does no
IO and starts no thread. It is not thread-safe, so callers hold the tier's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class EvictionPolicy(ABC, Generic[Item]):
    """The order in which items leave one tier. None is not an item."""

    @abstractmethod
    def added(self, item: Item) -> None:
        """Record that the tier now holds `item`. An item that the tier holds already keeps its state."""

    @abstractmethod
    def used(self, item: Item) -> None:
        """Record that a request used `item`. Raises KeyError if the tier does not hold the item."""

    @abstractmethod
    def removed(self, item: Item) -> None:
        """Record that `item` left the tier. Raises KeyError if the tier does not hold the item."""

    @abstractmethod
    def expect(self, upcoming: Sequence[Item]) -> None:
        """Replace the look-ahead window by `upcoming`: the items that waiting requests will use.

        The soonest use comes first. The window may name an item several times, and items that the tier does
        not hold. The caller cuts the queue to the length of the window.
        """

    @abstractmethod
    def victim(self, pinned: Container[Item] = ()) -> Item | None:
        """Return the item that should leave next, or None if the tier holds no item outside `pinned`.

        The state does not change: the item stays until the caller reports `removed`.
        """


class Lru(EvictionPolicy[Item]):
    """Evict the least recently used item first. An item that was never used is as old as its addition."""

    def __init__(self) -> None:
        self._oldest_first: OrderedDict[Item, None] = OrderedDict()

    def __contains__(self, item: object) -> bool:
        return item in self._oldest_first

    def added(self, item: Item) -> None:
        """Record that the tier now holds `item`."""
        self._oldest_first.setdefault(item)

    def used(self, item: Item) -> None:
        """Make `item` the youngest item. Raises KeyError if the tier does not hold the item."""
        self._oldest_first.move_to_end(item)

    def removed(self, item: Item) -> None:
        """Record that `item` left the tier. Raises KeyError if the tier does not hold the item."""
        del self._oldest_first[item]

    def expect(self, upcoming: Sequence[Item]) -> None:
        """Ignore the queue: the age of an item depends on the past alone."""

    def victim(self, pinned: Container[Item] = ()) -> Item | None:
        """Return the oldest item outside `pinned`, in O(1) plus the skipped pinned items."""
        return _first_unpinned(self._oldest_first, pinned)


class Fifo(Lru[Item]):
    """Evict the item first that has been in the tier for the longest time."""

    def used(self, item: Item) -> None:
        """Keep the order. Raises KeyError if the tier does not hold the item."""
        if item not in self:
            raise KeyError(item)


class LookAhead(EvictionPolicy[Item]):
    """Evict the item first that no waiting request will use, or else the item that is used last in the queue.

    This policy is the scheduler-aware eviction of CachedAttention (section 3.3.2):

    1. Items outside the look-ahead window leave first, in the order of their last use. An item that drops out
       of the window counts as used at that moment.
    2. If the window names every item that may leave, the item nearest to the tail of the window leaves first.
       If the window names an item several times, its soonest use counts.

    The two rules serve memory and disk. The paper exempts the items of the window from leaving the store, and
    so does rule 1 as long as the tier holds another item. The paper also requires room on a full disk that
    holds items of the queue only: Figure 9 evicts the item of the last job of the queue, and so does rule 2.

    `expect` takes O(window). `victim` takes O(1) plus the skipped items: pinned items, and items of the
    window that the tier does not hold. Such items at the tail of the window are skipped by one call only,
    until the tier adds an item behind them.
    """

    def __init__(self) -> None:
        self._outside: Lru[Item] = Lru()  # items of the tier that the window does not name
        self._inside: set[Item] = set()  # items of the tier that the window names
        self._window: list[Item] = []  # soonest first, each item once, in the tier or not
        self._positions: dict[Item, int] = {}  # item -> its index in _window
        self._end = 0  # the tier holds no item of _window[_end:]

    def added(self, item: Item) -> None:
        """Record that the tier now holds `item`: inside the window, or as the youngest item outside."""
        position = self._positions.get(item)
        if position is None:
            self._outside.added(item)
        else:
            self._inside.add(item)
            self._end = max(self._end, position + 1)

    def used(self, item: Item) -> None:
        """Make `item` the youngest item outside the window. Inside the window, the order does not change.

        Raises KeyError if the tier does not hold the item.
        """
        if item not in self._inside:
            self._outside.used(item)

    def removed(self, item: Item) -> None:
        """Record that `item` left the tier. Raises KeyError if the tier does not hold the item."""
        if item in self._inside:
            self._inside.remove(item)
        else:
            self._outside.removed(item)

    def expect(self, upcoming: Sequence[Item]) -> None:
        """Replace the window. Among the items that drop out, the soonest one becomes the youngest."""
        held = [item for item in reversed(self._window) if item in self._inside]
        window = list(dict.fromkeys(upcoming))
        self._positions = {item: position for position, item in enumerate(window)}
        for item in held:
            if item not in self._positions:
                self._inside.remove(item)
                self._outside.added(item)
        for item in window:
            if item in self._outside:
                self._outside.removed(item)
                self._inside.add(item)
        self._window, self._end = window, len(window)

    def victim(self, pinned: Container[Item] = ()) -> Item | None:
        """Return the item that should leave next, by rule 1 or else by rule 2."""
        outside = self._outside.victim(pinned)
        return self._last_inside(pinned) if outside is None else outside

    def _last_inside(self, pinned: Container[Item]) -> Item | None:
        while self._end and self._window[self._end - 1] not in self._inside:
            self._end -= 1
        tail_first = (self._window[position] for position in reversed(range(self._end)))
        return _first_unpinned((item for item in tail_first if item in self._inside), pinned)


def _first_unpinned(items: Iterable[Item], pinned: Container[Item]) -> Item | None:
    return next((item for item in items if item not in pinned), None)


# The name of a policy in the settings -> its class.
EVICTION: dict[str, type[EvictionPolicy[Any]]] = {"lru": Lru, "fifo": Fifo, "look-ahead": LookAhead}
