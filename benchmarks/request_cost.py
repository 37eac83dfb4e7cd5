"""Measure the processor time that a request of one text costs beside the model, by thread.

    attncache serve --no-maps
    python -m benchmarks request-cost --pid PID [--url http://127.0.0.1:8080] [--clients 1 16] [--texts FILE]

Every request asks for the same text, whose result the server keeps. So the model computes nothing, and what
is left is the way from the socket to the kept result and back: parsing, limits, tokenising, looking up, two
crossings of threads, metrics and serialising. The main thread is the event loop; the other threads tokenise.
With `--texts`, every request has a text of this file with a number, and the other threads also compute.
Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.overload import Clients, closed_loop, percentiles, requests_of

TEXT = b'{"inputs": "How do I find my new card?"}'
REQUEST = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(TEXT), TEXT)
WARM_UP_SECONDS = 2.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def thread_seconds(pid: int) -> dict[int, float]:
    """Return the processor time of each thread of a process, in seconds."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        found[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
    return found


async def measure(options: argparse.Namespace) -> None:
    """Measure with each number of clients, and print a table."""
    url = urlsplit(options.url)
    requests: Iterator[bytes] = itertools.repeat(REQUEST)
    if options.texts is not None:
        lines = options.texts.read_text(encoding="utf-8").splitlines()
        requests = requests_of([line for line in lines if line.strip()], batch=1)
    print("| clients | requests/s | p50 / p99, ms | event loop, µs | other threads, µs |")
    print("|---|---|---|---|---|")
    for count in options.clients:
        clients = Clients(url.hostname or "", url.port or 80, requests, connections=count, retry=False)
        await closed_loop(clients, count, WARM_UP_SECONDS)
        clients.answered.clear()
        before, began = thread_seconds(options.pid), time.perf_counter()
        await closed_loop(clients, count, options.seconds)
        seconds, after = time.perf_counter() - began, thread_seconds(options.pid)
        clients.close()
        answered = [answer.seconds * 1000 for answer in clients.answered if answer.status == 200]
        if not answered:
            sys.exit(f"{options.url} answered no request with status 200")
        spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
        loop = spent.pop(options.pid)
        cells = [
            f"{count}",
            f"{len(answered) / seconds:.0f}",
            " / ".join(percentiles(answered, digits=2)),
            f"{loop / len(answered) * 1e6:.0f}",
            f"{sum(spent.values()) / len(answered) * 1e6:.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--pid", type=int, required=True, help="process id of the server")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--texts", type=Path, help="a file with one text per line; default: one kept text")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each number of clients")
    options = parser.parse_args()
    gc.disable()
    asyncio.run(measure(options))
