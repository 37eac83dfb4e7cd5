"""The order in which waiting requests are served: flows take turns, by what their items cost.

This is start-time fair queueing (Goyal, Vin and Cheng 1996). Each flow has a virtual time, which grows by the
cost of what is served, and the flow with the least time is next. A flow that begins to wait begins at the
present virtual time, which grows by the share of each flow in what is served. So the flow goes before flows
that were served more than their share, and one text waits for at most one batch of a client with thousands of
texts. And the flow goes behind flows that began to wait long before it, however many flows come anew. An item
that does not fit into a batch any more keeps its turn, if its rest is small: otherwise the rest would wait
until all others were served once. Flows can hold flows: the connections of a key take turns within the turn
of the key.

The order also tells how much is served before an item that would be added now: not all that waits, but what
the flow itself has waiting, and what the others get until their times have passed the time of the item.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Counted:
    """What comes before a child without items. Until a flow is charged, it only grows."""

    time: float  # of the child
    ahead: int
    added: int = 0  # since then

    def compared(self, time: float, maximum: float) -> int | None:
        """Return a cost that is above `maximum` exactly if that of a child with this time is, or None."""
        at_most = self.ahead + self.added
        is_above = time >= self.time and self.ahead > maximum
        is_below = time <= self.time and at_most <= maximum
        return at_most if is_above or is_below else None


class FairOrder(Generic[T]):
    """Items of flows in the order in which they are served. Each flow is a FairOrder too. Not thread safe."""

    def __init__(self, at_once: int = 0, time: float = 0) -> None:
        """at_once: the most that a flow is charged for parts of an item before the next flow is served.

        time: the virtual time at which the flow begins to wait.
        """
        self._time = time  # virtual time: grows by the cost that is charged, at the end of each turn
        self._turn = 0  # what was charged in a turn that goes on
        self._at_once = at_once
        self.cost = 0  # of all items that wait; `ahead` is at most as much
        self.count_of_items = 0
        self._direct: deque[T] = deque()  # items that belong to no child
        self._direct_cost = 0
        self._children: dict[Hashable, FairOrder[T]] = {}
        # Each child once, by a time that it has or had, and by when it was put there.
        self._heap: list[tuple[float, int, Hashable]] = []
        self._numbers = itertools.count()
        self._waiting = 0  # children with items
        self._now = 0.0  # the time at which a child begins to wait
        self._counted: _Counted | None = None
        self._served: FairOrder[T] | None = None  # the child whose item `head` returned

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, roughly in the order of their service."""
        yield from self._direct
        for child in sorted(self._children.values(), key=lambda flow: flow._time):
            yield from child

    def add(self, item: T, flow: Sequence[Hashable]) -> None:
        """Add an item behind the items of its flow. flow: from the outside in: a key, a connection."""
        self.count_of_items += 1
        if not flow:
            self._direct.append(item)
            return
        name = flow[0]
        child = self._children.get(name)
        if child is None:
            child = self._children[name] = FairOrder(self._at_once, self._now)
            heapq.heappush(self._heap, (child._time, next(self._numbers), name))
        if not child.count_of_items:
            self._waiting += 1
            child._time = max(child._time, self._now)
        child.add(item, flow[1:])

    def count(self, flow: Sequence[Hashable], cost: int) -> None:
        """Note that items of a flow cost this much more, or less if negative. The flow has had an item.

        The costs of all items that were removed must come to 0.
        """
        self.cost += cost
        if self._counted and cost > 0:
            self._counted.added += cost
        else:
            self._counted = None
        if flow:
            self._children[flow[0]].count(flow[1:], cost)
        else:
            self._direct_cost += cost

    def ahead(self, flow: Sequence[Hashable], maximum: float | None = None) -> int:
        """Return the cost that is charged, at most, before an item that is added to a flow now is served.

        Each other flow counts too much, by up to what it is charged at once. Items that are added later may
        go first if their flows did not wait yet.
        maximum: the caller only asks whether the cost is above it; the cost is then not always counted anew.
        """
        if not flow:
            return self._direct_cost
        child = self._children.get(flow[0])
        if child is not None and child.count_of_items:
            within = child.ahead(flow[1:], maximum)
            ahead = within + self._ahead_at(within + child._time, child)
            is_known = maximum is None or ahead <= maximum or within > maximum
            return ahead if is_known else self.ahead(flow)
        starts = self._now if child is None else max(child._time, self._now)
        known = self._counted.compared(starts, maximum) if self._counted and maximum is not None else None
        if known is None:
            known = self._ahead_at(starts, child)
            self._counted = _Counted(starts, known)
        return known

    def _ahead_at(self, time: float, child: FairOrder[T] | None) -> int:
        """Return what other children are charged until their times have passed `time`, plus direct items."""
        latest = time + self._at_once
        # With thousands of flows, a call of min for each would take most of the event loop's time.
        others = [
            other.cost if other.cost < latest - other._time else latest - other._time
            for other in self._children.values()
            if other.cost and other._time <= time and other is not child
        ]
        return self._direct_cost + math.ceil(sum(others))

    def head(self) -> T | None:
        """Return the item to serve next, or None if there is no item."""
        if self._direct:
            self._served = None
            return self._direct[0]
        while self._heap:
            time, _, name = self._heap[0]
            child = self._children[name]
            if time < child._time:
                heapq.heapreplace(self._heap, (child._time, next(self._numbers), name))
            elif (item := child.head()) is not None:
                self._now = max(self._now, time)
                self._served = child
                return item
            else:
                # Until its time has come, an empty flow is kept. Otherwise a client that sends one text after
                # the other would never be charged.
                heapq.heappop(self._heap)
                del self._children[name]
        return None

    def charge(self, cost: int, left: int = 0) -> None:
        """Charge the flow of the item that `head` returned last. left: the cost of the rest of the item.

        If the rest may be served in the same turn, `head` returns the item again.
        """
        if self._served is not None:
            self._served._turn += cost
            if not left or self._served._turn + left > self._at_once:
                self._served._end_turn()
            self._served.charge(cost, left)
            self._counted = None
            # One more than wait, so that a child that begins to wait now goes before the one that was served.
            self._now += cost / (self._waiting + 1)

    def _end_turn(self) -> None:
        self._time += self._turn
        self._turn = 0

    def remove(self, item: T, flow: Sequence[Hashable]) -> None:
        """Remove an item. Raises ValueError if the flow has no such item."""
        if flow:
            child = self._children[flow[0]]
            child.remove(item, flow[1:])
            child._end_turn()
            self._waiting -= not child.count_of_items
        else:
            self._direct.remove(item)
        self.count_of_items -= 1
