"""Simulate servers behind entrances that route requests by their prefixes.

    seed -> draw_requests -> Request, by arrival -> entrance -> Server -> FleetReport
                                                               memory, disk, shared store

A prefix is the part of a prompt that other prompts begin with: a few-shot prompt, or the history of a
conversation. The caller gives all speeds.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.measuring.conversations import Conversations, draw_turns
from benchmarks.measuring.fleet_servers import Event, EventKind, Fleet, Found, Request, Server, Store

# As the entrance of docker/envoy.yaml is configured.
_MIN_RING_SIZE = 1024
_HASH_BALANCE = 1.25
# Of many servers that have had a prefix, the oracle compares this many.
_LOOKED_AT = 32


@dataclass(frozen=True, slots=True)
class Traffic:
    """What requests are drawn from."""

    seconds: float
    load: float  # of what all servers can compute, if no prefix is computed twice
    few_shot: float = 0.5  # shares of the requests; the rest are plain texts
    conversations: float = 0.5
    prefixes: int = 30  # few-shot prompts per server
    prefix_tokens: tuple[int, int] = (200, 1000)  # least and greatest length
    text_tokens: int = 50  # of a text behind a few-shot prompt, and of a plain text
    turns: float = 5.75
    turn_tokens: float = 100.0
    context: int = 4096  # tokens of the longest conversation
    think_seconds: float = 10.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What a route came to, over the second half of the time. Rates are of the tokens of prefixes."""

    route: str
    memory_hit_rate: float
    disk_hit_rate: float
    store_hit_rate: float
    computed_tokens: int
    busy: float  # work that arrived, as a share of what the servers can do
    greatest: float  # the most work of a server, over the mean
    p50_seconds: float  # from arrival to answer
    p99_seconds: float
    read_tokens_per_second: float  # from the store, of all servers
    written_tokens_per_second: float
    repeated: int  # requests that a lost server did not answer
    backlog_seconds: float  # of work that waits at the end, at the server with most of it

    @property
    def is_steady(self) -> bool:
        """Whether every server keeps up with what arrives: one that is always busy may."""
        return self.busy < 1 and self.backlog_seconds < 5


def requests_per_second(traffic: Traffic, fleet: Fleet) -> float:
    """Return how many requests arrive per second, on average."""
    new = (1 - traffic.conversations) * traffic.text_tokens + traffic.conversations * traffic.turn_tokens
    return traffic.load * fleet.servers * fleet.tokens_per_second / new


def draw_requests(traffic: Traffic, fleet: Fleet) -> list[Request]:
    """Return the requests of all clients by arrival. The same arguments give the same requests.

    Requests before 0 fill the tiers, and begin the conversations that go on at 0.
    """
    random, rate = np.random.default_rng(traffic.seed), requests_per_second(traffic, fleet)
    lead = 3 * traffic.turns * traffic.think_seconds
    conversations = Conversations(
        sessions=math.ceil(traffic.conversations * rate * (lead + traffic.seconds) / traffic.turns),
        rate=traffic.conversations * rate / traffic.turns or 1.0,
        turns=traffic.turns,
        turn_tokens=traffic.turn_tokens,
        think_seconds=traffic.think_seconds,
        context=traffic.context,
        seed=traffic.seed,
    )
    requests = [
        Request(turn.arrival - lead, -1 - turn.session, turn.history, turn.tokens, turn.tokens)
        for turn in draw_turns(conversations)
        if turn.arrival < lead + traffic.seconds
    ]
    prefixes = traffic.prefixes * fleet.servers
    lengths = random.integers(*traffic.prefix_tokens, prefixes, endpoint=True)
    popularity = 1 / np.arange(1, prefixes + 1)  # Zipf
    arrivals = _arrivals(random, traffic.few_shot * rate, -lead, traffic.seconds)
    chosen = random.choice(prefixes, len(arrivals), p=popularity / popularity.sum())
    for arrival, key in zip(arrivals.tolist(), chosen.tolist(), strict=True):
        length = int(lengths[key])
        requests.append(Request(arrival, key, length, length, length + traffic.text_tokens))
    plain = (1 - traffic.few_shot - traffic.conversations) * rate
    for arrival in _arrivals(random, plain, 0, traffic.seconds).tolist():
        requests.append(Request(arrival, None, 0, 0, traffic.text_tokens))
    return sorted(requests, key=lambda request: request.arrival)


def _arrivals(random: np.random.Generator, rate: float, first: float, last: float) -> np.ndarray:
    return random.uniform(first, last, random.poisson(max(0.0, rate) * (last - first)))


def _between(tokens: Mapping[int, int], first: float, last: float) -> float:
    """Return the tokens per second of a range of seconds, by second."""
    return sum(tokens[second] for second in range(int(first), int(last))) / (last - first)


class Ring:
    """Servers on a ring of hashes, as Envoy's ring hash places them."""

    def __init__(self, servers: Sequence[Server]) -> None:
        each = max(1, math.ceil(_MIN_RING_SIZE / len(servers)))
        places = sorted(
            (_hash(server.number, place), server.number) for server in servers for place in range(each)
        )
        self._hashes, self._numbers = [hashed for hashed, _ in places], [number for _, number in places]

    def number(self, key: int) -> int:
        """Return the number of the server that a key belongs to."""
        return self._numbers[bisect_left(self._hashes, _hash(key, -1)) % len(self._numbers)]


def _hash(first: int, second: int) -> float:
    return Random(first * 1_000_003 + second).random()


class Entrance:
    """Chooses a server for each request. It knows only the requests that it has sent itself."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.open: dict[int, int] = {}  # requests without an answer, by server
        self.total = 0

    def count(self, server: int, change: int) -> None:
        """Count a request that was sent, or answered if negative."""
        self.open[server] = self.open.get(server, 0) + change
        self.total += change

    def least_requests(self, servers: Sequence[Server]) -> Server:
        """Return the one of two random servers with fewer open requests."""
        first, second = self.random.choice(servers), self.random.choice(servers)
        return min(first, second, key=lambda server: self.open.get(server.number, 0))


class Simulation:
    """Servers, entrances and a clock. A route chooses the server of each request."""

    def __init__(self, fleet: Fleet, seed: int = 0) -> None:
        self.fleet = fleet
        self.store = Store(fleet.store_tokens, fleet.store_bandwidth) if fleet.has_store else None
        self.servers = [Server(number, fleet, self.store) for number in range(fleet.servers)]
        self.entrances = [Entrance(Random(seed + number)) for number in range(fleet.entrances)]
        self.alive = list(self.servers)
        self.ring = Ring(self.alive)
        self.holders: dict[int, list[int]] = {}  # servers that have had a prefix, for the oracle
        self._idle: list[tuple[float, int]] = []  # servers by the time at which they were free
        self._running: list[tuple[float, int, int, int, Request]] = []
        self._sent = 0
        self._events = sorted(fleet.events)
        self._latencies: list[tuple[float, float]] = []  # arrival and seconds until the answer
        self._repeated = 0

    def run(self, route: str, requests: Sequence[Request]) -> FleetReport:
        """Send requests by a route of ROUTES. A simulation runs once.

        Before 0 computing takes no time, so that the tiers are full when the servers begin to queue. The
        report is of the second half of the time after 0.
        """
        choose, half = ROUTES[route], requests[-1].arrival / 2
        self._set_speed(math.inf)
        found = np.zeros(3)
        prefixes, tokens, is_warming = 0, 0, True
        before: dict[int, float] = {}
        for number, request in enumerate(requests):
            if is_warming and request.arrival >= 0:
                is_warming = False
                self._set_speed(self.fleet.tokens_per_second)
            self._advance(request.arrival, choose)
            if not before and request.arrival >= half:
                before = {server.number: server.work for server in self.servers}
            entrance = number % len(self.entrances)
            taken = self._send(choose, request, entrance, request.arrival)
            if before:
                found += taken[:3]
                prefixes += request.prefix
                tokens += request.tokens
        end = requests[-1].arrival
        backlog = max(0.0, *(server.free_at - end for server in self.alive))
        self._advance(math.inf, choose)
        work = np.array([server.work - before.get(server.number, 0.0) for server in self.alive])
        late = [seconds for arrival, seconds in self._latencies if arrival >= half]
        counts = (self.store.read, self.store.written) if self.store else ()
        read, written = [_between(counted, half, end) for counted in counts] or (0.0, 0.0)
        memory, disk, store = (found / max(1, prefixes)).tolist()
        return FleetReport(
            route=route,
            memory_hit_rate=memory,
            disk_hit_rate=disk,
            store_hit_rate=store,
            computed_tokens=int(tokens - found.sum()),
            busy=float(work.mean() / (end - half)),
            greatest=float(work.max() / work.mean()),
            p50_seconds=float(np.percentile(late, 50)),
            p99_seconds=float(np.percentile(late, 99)),
            read_tokens_per_second=read,
            written_tokens_per_second=written,
            repeated=self._repeated,
            backlog_seconds=backlog,
        )

    def _set_speed(self, tokens_per_second: float) -> None:
        for server in self.alive:
            server.speed = tokens_per_second

    def freest(self) -> Server:
        """Return the server that is free first."""
        if not self._idle:
            self._idle = [(server.free_at, server.number) for server in self.alive]
            heapq.heapify(self._idle)
        while True:
            free_at, number = self._idle[0]
            server = self.servers[number]
            if server.is_lost:
                heapq.heappop(self._idle)
            elif free_at < server.free_at:
                heapq.heapreplace(self._idle, (server.free_at, number))
            else:
                return server

    def _send(self, choose: Route, request: Request, entrance: int, now: float) -> Found:
        server = choose(self, self.entrances[entrance], request, now)
        found, finished = server.serve(request, now)
        if request.key is not None:
            holders = self.holders.setdefault(request.key, [])
            if not found.memory and server.number not in holders:
                holders.append(server.number)
        self.entrances[entrance].count(server.number, 1)
        self._sent += 1
        heapq.heappush(self._running, (finished, self._sent, entrance, server.number, request))
        return found

    def _advance(self, now: float, choose: Route) -> None:
        """Let everything happen until now: answers, and events of servers."""
        while self._events and self._events[0].seconds <= now:
            event = self._events.pop(0)
            self._answer_until(event.seconds)
            self._apply(event, choose)
        self._answer_until(now)

    def _answer_until(self, now: float) -> None:
        while self._running and self._running[0][0] <= now:
            finished, _, entrance, server, request = heapq.heappop(self._running)
            self.entrances[entrance].count(server, -1)
            self._latencies.append((request.arrival, finished - request.arrival))

    def _apply(self, event: Event, choose: Route) -> None:
        if event.kind is EventKind.ADDED:
            for _ in range(event.servers):
                server = Server(len(self.servers), self.fleet, self.store)
                server.free_at = event.seconds
                self.servers.append(server)
                self.alive.append(server)
        chosen = self.alive[: event.servers] if event.kind is not EventKind.ADDED else []
        for server in chosen:
            if event.kind is EventKind.SLOW:
                server.speed /= self.fleet.slow_factor
            else:
                server.is_lost = True
                self.alive.remove(server)
        self._idle = []
        self.ring = Ring(self.alive)
        if event.kind is EventKind.LOST:
            self._repeat({server.number for server in chosen}, event.seconds, choose)

    def _repeat(self, lost: set[int], now: float, choose: Route) -> None:
        """Send the requests again that lost servers have not answered."""
        open_requests = [entry for entry in self._running if entry[3] in lost]
        self._running = [entry for entry in self._running if entry[3] not in lost]
        heapq.heapify(self._running)
        for _, _, entrance, server, request in sorted(open_requests):
            self.entrances[entrance].count(server, -1)
            self._send(choose, request, entrance, now)
        self._repeated += len(open_requests)


Route = Callable[[Simulation, Entrance, Request, float], Server]


def _least_requests(simulation: Simulation, entrance: Entrance, _: Request, __: float) -> Server:
    return entrance.least_requests(simulation.alive)


def _ring_hash(simulation: Simulation, entrance: Entrance, request: Request, _: float) -> Server:
    if request.key is None:
        return entrance.least_requests(simulation.alive)
    return simulation.servers[simulation.ring.number(request.key)]


def _bounded(simulation: Simulation, entrance: Entrance, request: Request, now: float) -> Server:
    """Ring hash whose load is bounded: Mirrokni, Thorup, Zadimoghaddam 2018, as Envoy implements it."""
    first = _ring_hash(simulation, entrance, request, now)
    if request.key is None:
        return first
    room = max(1, math.ceil(entrance.total * _HASH_BALANCE / len(simulation.alive)))
    for server in _others(first, simulation.alive, request.key):
        if entrance.open.get(server.number, 0) <= room:
            return server
    return first


def _others(first: Server, servers: Sequence[Server], key: int) -> Iterator[Server]:
    """Yield the server of a key, and then random others, the same ones for the same key."""
    yield first
    random = Random(key)
    for _ in range(len(servers)):
        yield servers[random.randrange(len(servers))]


def _oracle(simulation: Simulation, entrance: Entrance, request: Request, now: float) -> Server:
    """Return the server that answers first, by what all servers have stored and have to do."""
    if now < 0:  # all answer at once
        return _ring_hash(simulation, entrance, request, now)
    holders = [] if request.key is None else simulation.holders.get(request.key, [])
    if len(holders) > _LOOKED_AT:
        holders = entrance.random.sample(holders, _LOOKED_AT)
    candidates = [simulation.servers[number] for number in holders]
    return min(
        (*(server for server in candidates if not server.is_lost), simulation.freest()),
        key=lambda server: (
            max(now, server.free_at) + server.look_up(request, max(now, server.free_at)).seconds
        ),
    )


ROUTES: dict[str, Route] = {
    "least requests": _least_requests,  # of two random servers
    "ring hash": _ring_hash,
    "bounded ring hash": _bounded,
    "oracle": _oracle,
}


def simulate(routes: Iterable[str], traffic: Traffic, fleet: Fleet) -> Iterator[FleetReport]:
    """Yield the report of each route, on the same requests."""
    requests = draw_requests(traffic, fleet)
    for route in routes:
        yield Simulation(fleet, traffic.seed).run(route, requests)
