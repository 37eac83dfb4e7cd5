"""Replay a trace of jobs through a simulated store of two tiers, to compare eviction policies.

    memory (a hit) <-> disk (a slower hit) -> out of the store (a miss)

All items have the same size. Between two jobs, an item is in memory, on disk, or in neither. Jobs run one
after another, in the order of their arrival. There is no clock: a transfer that starts during a job ends with
the job.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic

from attncache_core.reuse.kv.eviction import Item, LookAhead


@dataclass(frozen=True, slots=True)
class Job(Generic[Item]):
    """One use of an item, for example one turn of a session."""

    item: Item
    waiting: int = 0  # number of jobs that wait when this job starts: the next ones of the trace


class Action(StrEnum):
    """What happens to an item of the store between two uses."""

    FETCH = "fetch"  # disk -> memory
    DEMOTE = "demote"  # memory -> disk
    DROP = "drop"  # disk -> out of the store


@dataclass(frozen=True, slots=True)
class Event(Generic[Item]):
    """One action on one item; `job` is the index of the running job in the trace."""

    job: int
    action: Action
    item: Item


@dataclass(frozen=True, slots=True)
class Replay(Generic[Item]):
    """The result of a replay. The counts of `memory_hits`, `disk_hits` and `misses` add up to the jobs."""

    memory_hits: int
    disk_hits: int
    misses: int
    events: tuple[Event[Item], ...]  # in the order of the decisions
    memory: frozenset[Item]  # items in memory after the last job
    disk: frozenset[Item]  # items on disk after the last job

    @property
    def hits(self) -> int:
        """Jobs that found their item in memory or on disk."""
        return self.memory_hits + self.disk_hits

    def count(self, action: Action) -> int:
        """Return the number of events with this action."""
        return sum(event.action is action for event in self.events)


def replay(
    jobs: Sequence[Job[Item]],
    memory_items: int,
    disk_items: int,
    policy: Callable[[], LookAhead[Item]],
    *,
    prefetch_window: int,
    eviction_window: int,
) -> Replay[Item]:
    """Return what a store of `memory_items` + `disk_items` places does with a trace (CachedAttention, 3.3).

    `policy` creates the eviction policy of a tier. Windows count waiting jobs: the store fetches the items of
    the first `prefetch_window` jobs from disk to memory, and the policies expect the items of the first
    `eviction_window` jobs. The paper's lengths are memory_items, and memory_items + disk_items.

    A new item enters memory when its job ends. A fetched item holds its place on disk until the transfer has
    ended, as in Figure 9: the item that leaves memory in return needs another place on disk.

    Raises ValueError if memory has no place or the disk has fewer than none.
    """
    if memory_items < 1 or disk_items < 0:
        raise ValueError(f"a store needs memory_items >= 1 and disk_items >= 0: {memory_items}, {disk_items}")
    store = _Store(_Tier(memory_items, policy()), _Tier(disk_items, policy()))
    look_ahead = max(prefetch_window, eviction_window)
    found = []
    for index, job in enumerate(jobs):
        store.job = index
        queue = jobs[index + 1 : index + 1 + min(job.waiting, look_ahead)]
        upcoming = [waiting.item for waiting in queue]
        found.append(store.run(job.item, upcoming[:prefetch_window], upcoming[:eviction_window]))
    return Replay(
        memory_hits=sum(tier is store.memory for tier in found),
        disk_hits=sum(tier is store.disk for tier in found),
        misses=sum(tier is None for tier in found),
        events=tuple(store.events),
        memory=frozenset(store.memory.items),
        disk=frozenset(store.disk.items),
    )


class _Tier(Generic[Item]):
    """The items of one tier. The tier may hold more items than `places` until the store has made room."""

    def __init__(self, places: int, policy: LookAhead[Item]) -> None:
        self.places = places
        self.policy = policy
        self.items: set[Item] = set()

    def add(self, item: Item) -> None:
        self.items.add(item)
        self.policy.added(item)

    def remove(self, item: Item) -> None:
        self.items.remove(item)
        self.policy.removed(item)

    def surplus(self, pinned: Container[Item]) -> Iterator[Item]:
        """Remove and yield items until the places suffice."""
        while len(self.items) > self.places:
            item = self.policy.victim(pinned)
            assert item is not None
            self.remove(item)
            yield item


class _Store(Generic[Item]):
    def __init__(self, memory: _Tier[Item], disk: _Tier[Item]) -> None:
        self.memory = memory
        self.disk = disk
        self.job = 0
        self.events: list[Event[Item]] = []

    def run(self, item: Item, prefetch: Sequence[Item], expected: Sequence[Item]) -> _Tier[Item] | None:
        """Run one job and return the tier that held its item, or None for a miss."""
        self.memory.policy.expect(expected)
        self.disk.policy.expect(expected)
        found = next((tier for tier in (self.memory, self.disk) if item in tier.items), None)
        if found is self.memory:
            self.memory.policy.used(item)
        elif found is self.disk:
            self._fetch(item, {item})
        self._prefetch(item, prefetch)
        if found is None:
            self.memory.add(item)
            self._make_room(pinned=())
        return found

    def _prefetch(self, running: Item, waiting: Sequence[Item]) -> None:
        """Fetch waiting items, soonest first, without evicting the running item or a sooner one."""
        needed = {running}
        for item in waiting:
            needed.add(item)
            if item in self.disk.items and self._has_room_beside(needed):
                self._fetch(item, needed)

    def _has_room_beside(self, needed: Container[Item]) -> bool:
        has_free_place = len(self.memory.items) < self.memory.places
        return has_free_place or self.memory.policy.victim(needed) is not None

    def _fetch(self, item: Item, pinned: Container[Item]) -> None:
        self._note(Action.FETCH, item)
        self.memory.add(item)
        self._make_room(pinned)
        self.disk.remove(item)

    def _make_room(self, pinned: Container[Item]) -> None:
        for demoted in self.memory.surplus(pinned):
            self._note(Action.DEMOTE, demoted)
            self.disk.add(demoted)
            for dropped in self.disk.surplus(pinned):
                self._note(Action.DROP, dropped)

    def _note(self, action: Action, item: Item) -> None:
        self.events.append(Event(self.job, action, item))
