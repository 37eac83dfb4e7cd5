"""Show what a running server does with more requests than it can answer.

    attncache serve --no-reuse
    python -m benchmarks overload --texts texts.txt [--url http://127.0.0.1:8080] [--batch 1] [--seconds 15]

Capacity is the number of requests per second that `--clients` clients get answered, each of which waits for
its response. Then requests arrive at multiples of this rate, whether earlier ones were answered or not, at
random times (a Poisson process). Times count from the moment a request should be sent, so that a slow client
hides nothing; the last column says how late this client itself was. With `--retry`, a client that gets
status 429 sends its request again after `Retry-After`, up to three times, and its time counts from its first
try. The texts are those of the file, one per line, in order; a number makes each of them another text, so
that no result is known.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

WARM_UP_SECONDS = 3.0
# Requests that were not answered so long after the last one was sent are given up.
PATIENCE_SECONDS = 15.0
MAX_TRIES = 4


@dataclass
class Answered:
    """The response to one request."""

    seconds: float  # since the request should have been sent
    status: int
    tries: int


class Connection(asyncio.Protocol):
    """One connection that stays open, with one request at a time. Far cheaper than a client library."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._pending: asyncio.Future[tuple[int, int]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Fail the request that waits. Called by asyncio."""
        self._transport = None
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(ConnectionError())

    def data_received(self, data: bytes) -> None:
        """Read the response. Called by asyncio."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < header(head, b"content-length"):
            return
        self._received = b""
        if self._pending is not None and not self._pending.done():
            self._pending.set_result((int(head[9:12]), header(head, b"retry-after")))

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    async def ask(self, request: bytes) -> tuple[int, int]:
        """Send a request. Returns the status, and the seconds of `Retry-After`; 0 without this header."""
        if self._transport is None:
            raise ConnectionError
        self._pending = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._pending


def header(head: bytes, name: bytes) -> int:
    """Return the number in a header of a response, or 0."""
    start = head.lower().find(b"\r\n" + name + b":")
    return int(head[start:].split(b"\r\n", 2)[1].split(b":")[1]) if start >= 0 else 0


class Clients:
    """Sends requests over connections that are kept."""

    def __init__(
        self, host: str, port: int, requests: Iterator[bytes], connections: int, *, retry: bool
    ) -> None:
        self._address = host, port
        self._requests = requests
        self._max_tries = MAX_TRIES if retry else 1
        self._idle: deque[Connection] = deque()
        self._connections = asyncio.Semaphore(connections)
        self.answered: list[Answered] = []
        self.failed = 0  # connections that were lost or refused
        self.late: list[float] = []  # ms between the moment a request should be sent and its first byte

    async def send(self, due: float) -> None:
        """Send one request, again if it is refused. due: when it should be sent."""
        request, tries, status = next(self._requests), 0, 429
        while status == 429 and tries < self._max_tries:
            tries += 1
            try:
                status, retry_after = await self._ask(request, due if tries == 1 else None)
            except OSError:
                self.failed += 1
                return
            if status == 429 and tries < self._max_tries:
                # Not all at the same moment.
                await asyncio.sleep(retry_after * random.uniform(1.0, 1.5))
        self.answered.append(Answered(time.perf_counter() - due, status, tries))

    def close(self) -> None:
        """Close the connections, so that others find room at the server."""
        for connection in self._idle:
            connection.close()

    async def _ask(self, request: bytes, due: float | None) -> tuple[int, int]:
        async with self._connections:
            # The one that was idle longest, as if each request came from another client.
            connection = self._idle.popleft() if self._idle else None
            if connection is None or not connection.is_open:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(Connection, *self._address)
            if due is not None:
                self.late.append((time.perf_counter() - due) * 1000)
            answer = await connection.ask(request)
            self._idle.append(connection)
            return answer


async def closed_loop(clients: Clients, count: int, seconds: float) -> None:
    """Let clients send one request after the other."""
    end = time.perf_counter() + seconds

    async def client() -> None:
        while (now := time.perf_counter()) < end:
            await clients.send(now)

    await asyncio.gather(*(client() for _ in range(count)))


async def open_loop(clients: Clients, per_second: float, seconds: float) -> None:
    """Send requests at random times, whether earlier ones were answered or not."""
    due = time.perf_counter()
    end = due + seconds
    sending: set[asyncio.Task[None]] = set()
    while (due := due + random.expovariate(per_second)) < end:
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        task = asyncio.create_task(clients.send(due))
        sending.add(task)
        task.add_done_callback(sending.discard)
    if sending:
        _, late = await asyncio.wait(sending, timeout=PATIENCE_SECONDS)
        for task in late:
            task.cancel()
        clients.failed += len(late)


def requests_of(texts: list[str], batch: int) -> Iterator[bytes]:
    """Yield HTTP requests for ever; no text comes twice."""
    numbered = (f"{text} {number}" for number, text in enumerate(itertools.cycle(texts)))
    while True:
        body = json.dumps({"inputs": list(itertools.islice(numbered, batch))}).encode()
        yield b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def row(name: str, offered: float, seconds: float, clients: Clients) -> tuple[str, float]:
    """Return a row of the table, and the 99th percentile of answered requests in ms."""
    by_status: dict[int, list[float]] = {}
    for answer in clients.answered:
        by_status.setdefault(answer.status, []).append(answer.seconds * 1000)
    good, refused = by_status.get(200, []), by_status.get(429, [])
    everything = max(1, len(clients.answered) + clients.failed)
    others = Counter(str(answer.status) for answer in clients.answered if answer.status not in (200, 429))
    others["failed"] += clients.failed
    cells = [
        name,
        f"{offered:.0f}",
        f"{len(good) / seconds:.0f}",
        " / ".join(percentiles(good)),
        f"{len(refused) / everything:.0%}",
        " / ".join(percentiles(refused)),
        ", ".join(f"{count} x {kind}" for kind, count in others.items() if count) or "-",
        " / ".join(percentiles(clients.late)),
    ]
    return f"| {' | '.join(cells)} |", float(np.percentile(good, 99)) if good else float("nan")


def percentiles(milliseconds: list[float], digits: int = 0) -> list[str]:
    """Return the 50th and 99th percentile."""
    return (
        [f"{quantile:.{digits}f}" for quantile in np.percentile(milliseconds, [50, 99])]
        if milliseconds
        else ["-"]
    )


async def measure(options: argparse.Namespace, texts: list[str]) -> None:
    """Measure capacity, then each load, and print the table."""
    url = urlsplit(options.url)
    if url.hostname not in ("127.0.0.1", "localhost", "::1"):
        sys.exit(f"--url {options.url} is another machine; this load is for a server of one's own")
    requests = requests_of(texts, options.batch)

    def clients(*, retry: bool = False) -> Clients:
        return Clients(url.hostname or "", url.port or 80, requests, options.connections, retry=retry)

    closed = clients()
    await closed_loop(closed, options.clients, WARM_UP_SECONDS)
    closed.answered.clear()
    await closed_loop(closed, options.clients, options.seconds)
    closed.close()
    capacity = sum(answer.status == 200 for answer in closed.answered) / options.seconds
    print(
        "| load | requests/s | answered/s | p50 / p99, ms | 429 | p50 / p99 of a 429, ms | other "
        "| sent late, ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print(row(f"closed loop, {options.clients} clients", capacity, options.seconds, closed)[0], flush=True)
    high: dict[float, float] = {}
    for multiple in options.loads:
        loaded = clients(retry=options.retry)
        await open_loop(loaded, multiple * capacity, options.seconds)
        line, high[multiple] = row(f"{multiple:g} x", multiple * capacity, options.seconds, loaded)
        print(line, flush=True)
        loaded.close()
        await asyncio.sleep(1)
    if 1.0 in high and 4.0 in high:
        print(f"p99 at 4 x capacity is {high[4.0] / high[1.0]:.2f} times the p99 at capacity")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--texts", type=Path, required=True, help="a file with one text per line")
    parser.add_argument("--batch", type=int, default=1, help="texts per request")
    parser.add_argument("--clients", type=int, default=64, help="clients that find out the capacity")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.9, 1.0, 2.0, 4.0])
    parser.add_argument("--connections", type=int, default=900, help="most connections at once")
    parser.add_argument("--retry", action="store_true", help="send refused requests again after Retry-After")
    options = parser.parse_args()
    random.seed(0)
    gc.disable()
    texts = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    asyncio.run(measure(options, texts))
