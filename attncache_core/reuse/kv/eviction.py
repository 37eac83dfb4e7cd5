"""Eviction: choose the item that leaves the full memory of the key-value store.

    added, used, removed    the tier reports what happens to its items
    expect                  the queue reports the items that waiting requests will use
    victim                  the policy names the item that should leave the tier next

The policy holds item names only: block keys, or session numbers in a simulation. It does no IO and starts no
thread. It is not thread-safe, so callers hold the tier's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class LookAhead(Generic[Item]):
    """Evict the item first that no waiting request will use, or else the item that is used last in the queue.

    This policy is the scheduler-aware eviction of CachedAttention (section 3.3.2):

    1. Items outside the look-ahead window leave first, in the order of their last use. An item that drops out
       of the window counts as used at that moment.
    2. If the window names every item that may leave, the item nearest to the tail of the window leaves first.
       If the window names an item several times, its soonest use counts.

    Without a window, the least recently used item leaves. None is not an item. The paper exempts the items of
    the window from leaving the store, and so does rule 1 as long as the tier holds another item. The paper
    also requires room on a full disk that holds items of the queue only: Figure 9 evicts the item of the last
    job of the queue, and so does rule 2.

    `expect` takes O(window). `victim` takes O(1) plus the skipped items: pinned items, and items of the
    window that the tier does not hold. Such items at the tail of the window are skipped by one call only,
    until the tier adds an item behind them.
    """

    def __init__(self) -> None:
        # Items of the tier that the window does not name, the oldest first.
        self._outside: OrderedDict[Item, None] = OrderedDict()
        self._inside: set[Item] = set()  # items of the tier that the window names
        self._window: list[Item] = []  # soonest first, each item once, in the tier or not
        self._positions: dict[Item, int] = {}  # item -> its index in _window
        self._end = 0  # the tier holds no item of _window[_end:]

    def added(self, item: Item) -> None:
        """Record that the tier now holds `item`: inside the window, or as the youngest item outside.

        An item that the tier holds already keeps its state.
        """
        position = self._positions.get(item)
        if position is None:
            self._outside.setdefault(item)
        else:
            self._inside.add(item)
            self._end = max(self._end, position + 1)

    def used(self, item: Item) -> None:
        """Make `item` the youngest item outside the window. Inside the window, the order does not change.

        Raises KeyError if the tier does not hold the item.
        """
        if item not in self._inside:
            self._outside.move_to_end(item)

    def removed(self, item: Item) -> None:
        """Record that `item` left the tier. Raises KeyError if the tier does not hold the item."""
        if item in self._inside:
            self._inside.remove(item)
        else:
            del self._outside[item]

    def expect(self, upcoming: Sequence[Item]) -> None:
        """Replace the window by the items that waiting requests will use, soonest first.

        Among the items that drop out, the soonest one becomes the youngest. The window may name an item
        several times, and items that the tier does not hold.
        """
        held = [item for item in reversed(self._window) if item in self._inside]
        window = list(dict.fromkeys(upcoming))
        self._positions = {item: position for position, item in enumerate(window)}
        for item in held:
            if item not in self._positions:
                self._inside.remove(item)
                self._outside.setdefault(item)
        for item in window:
            if item in self._outside:
                del self._outside[item]
                self._inside.add(item)
        self._window, self._end = window, len(window)

    def victim(self, pinned: Container[Item] = ()) -> Item | None:
        """Return the item that should leave next, by rule 1 or else by rule 2. None: all are pinned.

        The item stays until the caller reports `removed`.
        """
        outside = _first_unpinned(self._outside, pinned)
        return self._last_inside(pinned) if outside is None else outside

    def _last_inside(self, pinned: Container[Item]) -> Item | None:
        while self._end and self._window[self._end - 1] not in self._inside:
            self._end -= 1
        tail_first = (self._window[position] for position in reversed(range(self._end)))
        return _first_unpinned((item for item in tail_first if item in self._inside), pinned)


def _first_unpinned(items: Iterable[Item], pinned: Container[Item]) -> Item | None:
    return next((item for item in items if item not in pinned), None)
