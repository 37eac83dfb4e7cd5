"""The order in which waiting requests are served: flows take turns, and a flow that is new goes first.

This is deficit round robin (Shreedhar and Varghese 1995) with the lists of new and old flows of RFC 8290. A
flow that is served more than its turn allows waits until all others had a turn. A flow that was not waiting
is served before the flows that wait, once. So one text never waits for more than one turn of a client with
thousands of texts. Flows can hold flows: the connections of a key take turns within the turn of the key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class FairOrder(Generic[T]):
    """Items of flows in the order of their service. Not thread safe."""

    def __init__(self, quantum: int) -> None:
        """quantum: cost that one flow may be charged before the next flow has its turn."""
        self._quantum = quantum
        self._root: _Flow[T] = _Flow()

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, roughly in the order of their service."""
        return self._root.items()

    def add(self, item: T, flow: Sequence[Hashable]) -> None:
        """Add an item behind the items of its flow. flow: from the outside in: a key, a connection."""
        self._root.add(item, flow, self._quantum)

    def head(self) -> T | None:
        """Return the item to serve next, or None if there is no item."""
        return self._root.head(self._quantum)

    def charge(self, cost: int) -> None:
        """Charge the flow of the item that `head` returned last."""
        self._root.charge(cost)

    def end_turn(self) -> None:
        """End the turn of the flow whose item `head` returned last, also if it was charged less."""
        self._root.end_turn()

    def remove(self, item: T, flow: Sequence[Hashable]) -> None:
        """Remove an item. Raises ValueError if the flow has no such item."""
        self._root.remove(item, flow)


class _Flow(Generic[T]):
    """Items of one flow, or flows within a flow."""

    __slots__ = ("_children", "_new", "_old", "_own", "_served", "credit")

    def __init__(self, credit: int = 0) -> None:
        self.credit = credit  # cost that this flow may still be charged in its turn
        self._own: deque[T] = deque()
        self._children: dict[Hashable, _Flow[T]] = {}
        self._new: deque[Hashable] = deque()
        self._old: deque[Hashable] = deque()
        self._served: _Flow[T] | None = None  # the child whose item `head` returned

    def __bool__(self) -> bool:
        return bool(self._own) or any(self._children.values())

    def items(self) -> Iterator[T]:
        yield from self._own
        for name in (*self._new, *self._old):
            yield from self._children[name].items()

    def add(self, item: T, flow: Sequence[Hashable], quantum: int) -> None:
        if not flow:
            self._own.append(item)
            return
        name = flow[0]
        if name not in self._children:
            self._children[name] = _Flow(quantum)
            self._new.append(name)
        self._children[name].add(item, flow[1:], quantum)

    def head(self, quantum: int) -> T | None:
        if self._own:
            self._served = None
            return self._own[0]
        while self._new or self._old:
            names = self._new or self._old
            child = self._children[names[0]]
            if child.credit <= 0:
                child.credit += quantum
                self._old.append(names.popleft())
            elif (item := child.head(quantum)) is not None:
                self._served = child
                return item
            elif names is self._new:
                # An empty flow keeps its place among the old ones for a round. Otherwise a client that sends
                # one text after the other would always be new.
                self._old.append(names.popleft())
            else:
                del self._children[names.popleft()]
        return None

    def charge(self, cost: int) -> None:
        if self._served is not None:
            self._served.credit -= cost
            self._served.charge(cost)

    def end_turn(self) -> None:
        if self._served is not None:
            self._served.credit = min(0, self._served.credit)
            self._served.end_turn()

    def remove(self, item: T, flow: Sequence[Hashable]) -> None:
        if flow:
            self._children[flow[0]].remove(item, flow[1:])
        else:
            self._own.remove(item)
