"""Run a soak: `python -m benchmarks soak`. Prints a table, draws a plot, and fails if anything was wrong."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from attncache_core import DEFAULT_MODEL, build_default_database, find_checkpoint
from benchmarks.soak.clients import Clients
from benchmarks.soak.disturbances import Disturbances
from benchmarks.soak.report import Report, Sample
from benchmarks.soak.served import Process, serving
from benchmarks.soak.texts import ask_idle, make_texts


def main() -> None:
    """Read the options, run a soak and show its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--database",
        type=Path,
        help="copied; the copy is damaged. Default: the default database, which is built if there is none",
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--texts", type=int, default=1000, help="distinct texts")
    parser.add_argument("--words", type=int, default=400, help="words of the longest text")
    parser.add_argument("--plot", type=Path, help="file for the plot")
    parser.add_argument("serve", nargs="*", help="options of `attncache serve`, after --")
    options = parser.parse_args()
    texts = make_texts(options.texts, options.words, seed=16)
    database = options.database or build_default_database(find_checkpoint(DEFAULT_MODEL))
    report = soak(database, texts, 60 * options.minutes, options.clients, options.serve)
    print(report.table())
    for problem in report.problems:
        print(problem, file=sys.stderr)
    if options.plot:
        report.plot(options.plot)
    sys.exit(bool(report.problems))


def soak(
    database: Path, texts: Sequence[str], seconds: float, clients: int, serve: Sequence[str] = ()
) -> Report:
    """Keep a server with a copy of a database at full load. serve: more options of `attncache serve`."""
    with tempfile.TemporaryDirectory(prefix="attncache-soak-") as folder:
        live, keys = Path(folder, "live"), Path(folder, "keys")
        shutil.copytree(database, live)
        disturbances = Disturbances(database, live, keys, seed=1)
        key = disturbances.new_key()
        fixed = ["--database", str(live), "--api-keys", str(keys), "--min-gain", "0"]
        with serving(Path(folder, "log"), [*fixed, *serve]) as server:
            return asyncio.run(_load(server, disturbances, key, list(texts), seconds, clients))


async def _load(
    server: Process, disturbances: Disturbances, key: str, texts: list[str], seconds: float, count: int
) -> Report:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as client:
        idle = await ask_idle(client, texts)
    clients = Clients(server.url, idle, key, seed=2)
    samples: list[Sample] = []
    watching = asyncio.create_task(_watch(server, clients, samples, every=min(1.0, seconds / 60)))
    disturbing = asyncio.create_task(
        disturbances.run(server, clients, seconds, every=min(10.0, seconds / 10))
    )
    await clients.run(count, seconds)
    watching.cancel()
    await disturbing
    return Report(clients.record, samples, disturbances.made)


async def _watch(server: Process, clients: Clients, samples: list[Sample], every: float) -> None:
    began = time.perf_counter()
    while True:
        second = time.perf_counter() - began
        samples.append(Sample(second, *server.memory(), server.files(), clients.record.texts))
        await asyncio.sleep(every)
