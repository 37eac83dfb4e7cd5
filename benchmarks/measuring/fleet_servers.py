"""The servers of a simulated fleet, and where each keeps the prefixes of prompts.

    Server -> memory, disk, shared store -> Found: what is taken from where, and how long a prompt takes

A server computes one request after the other. It takes a prefix from the nearest tier that has it, and
computes the rest.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import NamedTuple

# Above the keys of all prefixes.
_FIRST_TEXT = 1 << 40


class Request(NamedTuple):
    """One prompt. `key` names its prefix; None: no other prompt begins with the same tokens."""

    arrival: float  # seconds since the start
    key: int | None
    prefix: int  # tokens that may be stored
    stored: int  # tokens that the prompt leaves behind for prompts of the same key
    tokens: int  # of the whole prompt


class EventKind(StrEnum):
    """What happens to a server."""

    LOST = "lost"
    ADDED = "added"
    SLOW = "slow"


class Event(NamedTuple):
    """Something that happens to some servers."""

    seconds: float  # since the start
    kind: EventKind
    servers: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers, and what they share."""

    servers: int
    entrances: int = 1
    tokens_per_second: float = 800.0  # that a server computes
    request_seconds: float = 0.0  # that a request takes beside its tokens
    memory_tokens: int = 56_000  # that fit into a server's memory tier
    disk_tokens: int = 0  # that fit on a server's disk; 0: no disk tier
    disk_tokens_per_second: float = 50_000.0
    has_store: bool = False
    store_tokens_per_second: float = 22_000.0  # that a server reads from the store
    store_tokens: float = math.inf  # that fit into the store
    store_bandwidth: float = math.inf  # tokens per second that the store gives to and takes from all servers
    slow_factor: float = 4.0  # how much slower a slow server is
    events: tuple[Event, ...] = ()


class Tier:
    """Prefixes by key, up to a number of tokens. The least recently used ones leave first."""

    def __init__(self, max_tokens: float) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._texts = count(_FIRST_TEXT)  # keys of texts, which nobody looks up
        # Tokens, since when they are stored, and the tokens that were stored before.
        self._stored: OrderedDict[int, tuple[int, float, int]] = OrderedDict()

    def find(self, key: int, now: float) -> int:
        """Return how many tokens of a prefix are stored now. To look a prefix up does not use it."""
        tokens, since, before = self._stored.get(key, (0, now, 0))
        return tokens if since <= now else before

    def put(self, key: int, tokens: int, since: float) -> None:
        """Store so many tokens of a prefix at a time."""
        known = self._stored.get(key, (0, 0.0, 0))
        if known[0] < tokens:
            self._stored[key] = tokens, since, known[0]
            self._tokens += tokens - known[0]
        self._stored.move_to_end(key)
        while self._tokens > self._max_tokens:
            self._tokens -= self._stored.popitem(last=False)[1][0]

    def put_text(self, tokens: int, since: float) -> None:
        """Store a text, which nobody looks up, and which takes room until it leaves."""
        if tokens:
            self.put(next(self._texts), tokens, since)


class Store:
    """What all servers share, behind a network with a bandwidth. Servers read from it and write to it."""

    def __init__(self, max_tokens: float, bandwidth: float) -> None:
        """bandwidth: tokens per second, of all servers."""
        self.tier = Tier(max_tokens)
        self.read: Counter[int] = Counter()  # tokens of each second
        self.written: Counter[int] = Counter()
        self._bandwidth = bandwidth
        self._second = 0
        self._waiting = 0.0  # tokens of the seconds before this one that have not passed the network

    def advance(self, now: float) -> None:
        """Note that nobody reads or writes any more before this time."""
        while self._second < int(now):
            self._waiting = self._behind(self._second)
            self._second += 1

    def seconds(self, tokens: int, now: float) -> float:
        """Return how long it takes until so many tokens have left the store."""
        return (self._behind(int(now)) + tokens) / self._bandwidth

    def take(self, key: int, tokens: int, now: float) -> None:
        """Read so many tokens of a prefix, which then was used last."""
        self.tier.put(key, 0, now)
        self._move(self.read, tokens, now)

    def save(self, request: Request, known: int, now: float) -> None:
        """Write what a server has computed of a prompt, all behind the known tokens, and the store lacks.

        A server whose writes would wait for more than a second drops them. Tokens whose beginning the store
        has lost take room, and nobody finds them.
        """
        stored = 0 if request.key is None else self.tier.find(request.key, now)
        lacking = max(0, request.stored - max(known, stored))
        text = request.tokens - request.stored
        if self._behind(int(now)) > self._bandwidth:
            return
        self._move(self.written, lacking + text, now)
        if request.key is not None and stored >= known:
            if lacking:
                self.tier.put(request.key, request.stored, now)
        else:
            text += lacking
        self.tier.put_text(text, now)

    def _move(self, counts: Counter[int], tokens: int, now: float) -> None:
        if now >= 0:  # before, the tiers are being filled
            counts[int(now)] += tokens

    def _behind(self, second: int) -> float:
        """Return how many tokens too many there are until the end of a second."""
        waiting = self._waiting
        for each in range(self._second, second + 1):
            waiting = max(0.0, waiting + self.read[each] + self.written[each] - self._bandwidth)
        return waiting


class Found(NamedTuple):
    """Where the tokens of a prefix are taken from, and the seconds that a prompt takes then."""

    memory: int
    disk: int
    store: int
    seconds: float


class Server:
    """One server with its tiers. It computes one request after the other."""

    def __init__(self, number: int, fleet: Fleet, store: Store | None) -> None:
        self.number = number
        self.free_at = -math.inf
        self.work = 0.0  # seconds
        self.is_lost = False
        self.memory = Tier(fleet.memory_tokens)
        self.disk = Tier(fleet.disk_tokens) if fleet.disk_tokens else None
        self.store = store
        self.speed = fleet.tokens_per_second
        self._fleet = fleet

    def look_up(self, request: Request, now: float) -> Found:
        """Return where a prompt's tokens would come from. What is faster computed is not loaded."""
        if request.key is None:
            return Found(0, 0, 0, self._beside + request.tokens / self.speed)
        known = memory = min(request.prefix, self.memory.find(request.key, now))
        disk = store = 0
        seconds = self._beside
        if self.disk is not None and self._fleet.disk_tokens_per_second > self.speed:
            disk = max(0, min(request.prefix, self.disk.find(request.key, now)) - known)
            known += disk
            seconds += disk / self._fleet.disk_tokens_per_second
        if self.store is not None and known < request.prefix:
            more = max(0, min(request.prefix, self.store.tier.find(request.key, now)) - known)
            loading = max(self.store.seconds(more, now), more / self._fleet.store_tokens_per_second)
            if more and loading < more / self.speed:
                store = more
                known += more
                seconds += loading
        return Found(memory, disk, store, seconds + (request.tokens - known) / self.speed)

    @property
    def _beside(self) -> float:
        return 0.0 if math.isinf(self.speed) else self._fleet.request_seconds

    def serve(self, request: Request, now: float) -> tuple[Found, float]:
        """Compute a prompt when its turn comes. Returns where its prefix was, and when it is answered."""
        start = max(now, self.free_at)
        if self.store is not None:
            self.store.advance(now)
        found = self.look_up(request, start)
        self.free_at = start + found.seconds
        self.work += found.seconds
        tiers = [self.memory] if self.disk is None else [self.memory, self.disk]
        for tier in tiers:
            if request.key is not None:
                tier.put(request.key, request.stored, self.free_at)
            tier.put_text(request.tokens - request.stored, self.free_at)
        if self.store is not None:
            if found.store and request.key is not None:
                self.store.take(request.key, found.store, start)
            self.store.save(request, found.memory + found.disk + found.store, self.free_at)
        return found, self.free_at
