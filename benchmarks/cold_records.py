"""Measure what reuse costs and saves if the records of a database are not in memory.

    python -m benchmarks cold-records --database bank5k.db --data bank5k.tsv

The texts are recorded, so each text takes maps of its own from the disk: the worst case of a database that is
larger than memory. Before a batch is timed, its records are dropped from memory:

    exact       nothing is reused
    memory      the records stay in memory
    rule        the records were dropped; the server's rule decides which of them are read
    prefetched  the records were dropped, and asked for before another batch was computed, as if the texts had
                been looked up when they began to wait
    no rule     the records were dropped, and all of them are read

Another batch is computed exactly before each timed one. The ways alternate. The figures are medians over
batches and rounds: milliseconds, and the ratio to `exact` for the same batch in the same round, with its 95th
percentile. The time of looking ahead counts for `prefetched`.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np

from attncache_core import AttentionDatabase, PrefillEngine, find_checkpoint
from attncache_core.corpus.reading import read_texts
from attncache_core.engine.forward import ForwardPass, forward_pass
from attncache_core.engine.runner import threads_of
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.storage.segment import Segment
from attncache_core.text.token_batch import TokenBatch, pack
from benchmarks.measuring.stores import alternating, timed
from service.commands.report import machine, show_machine, show_table

_MADV_DONTNEED = 4
_LOOKS = 1000


@click.command()
@click.option("--model", default="all-MiniLM-L6-v2", show_default=True)
@click.option("--database", type=click.Path(path_type=Path), required=True)
@click.option("--data", required=True, help="FILE or FILE:column,column with recorded texts.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--batches", default=8, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", type=int)
@click.option(
    "--saved", default=0.0, show_default=True, help="Microseconds that a hit saves per token, for the rule."
)
def main(
    model: str,
    database: Path,
    data: str,
    batch_size: int,
    batches: int,
    rounds: int,
    threads: int | None,
    saved: float,
) -> None:
    """Print the milliseconds and the hits of a batch, for each way."""
    opened = AttentionDatabase.open(database)
    engine = PrefillEngine.load(find_checkpoint(model), database=opened, threads=threads)
    search = opened.search
    known = [ids for ids in engine.tokenize(read_texts(data)) if search.store.record_of(ids) is not None]
    chosen = np.random.default_rng(0).permutation(len(known))[: (batches + 1) * batch_size]
    *made, between = [
        pack([known[index] for index in chosen[at : at + batch_size]])
        for at in range(0, len(chosen), batch_size)
    ]
    ruled, unruled = (_with_saved(search, seconds) for seconds in (saved / 1e6, np.inf))
    run = _runner(engine)

    def look_ahead(batch: TokenBatch) -> None:
        for segment, records in _records(unruled, batch):
            for _ in range(2):  # the second call asks for the records
                segment.are_cold(records, 0.0)

    ways = {"exact": None, "memory": unruled, "rule": ruled, "prefetched": ruled, "no rule": unruled}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    hits: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for batch in made:
            for name in alternating(list(ways), number):
                strategy = ways[name]
                if name == "memory":
                    run(batch, unruled)
                else:
                    _drop(_records(unruled, batch))
                ahead, _ = timed(partial(look_ahead, batch)) if name == "prefetched" else (0.0, None)
                run(between, None)
                seconds, done = timed(partial(run, batch, strategy))
                if number:  # the first round checks the records and reads the speed of the disk
                    taken[name].append(ahead + seconds)
                    hits[name].append(float(done.plan.hits.mean()))
    size = statistics.mean(
        segment.layout.record_bytes(segment.length) for segment in search.store.segments.values()
    )
    show_machine(
        {
            **machine(engine.threads),
            "database": f"{search.store.file_bytes / 1e6:.0f} MB, records of {size / 1e3:.0f} KB on average",
            "look whether a record is in memory": f"{_look_microseconds(unruled, made[0]):.2f} µs a text, "
            f"{_look_microseconds(unruled, made[0], known=True):.2f} µs if it was within the last second",
        }
    )
    show_table(
        f"batches of {batch_size} recorded texts",
        ("way", "ms", "of exact", "95th percentile", "hits"),
        [
            [
                name,
                f"{1e3 * statistics.median(seconds):.2f}",
                *(f"{np.percentile(np.divide(seconds, taken['exact']), q):.3f}" for q in (50, 95)),
                f"{statistics.mean(hits[name]):.2f}",
            ]
            for name, seconds in taken.items()
        ],
    )


def _with_saved(search: SearchEngine, seconds: float) -> SearchEngine:
    """Return the search engine without a limit of strangeness, as if each hit saved this time per token."""
    policy = replace(search.policy, limit=None)
    return replace(search, policy=policy, saved_per_token=dict.fromkeys(range(len(policy.groups)), seconds))


def _runner(engine: PrefillEngine) -> Callable[[TokenBatch, SearchEngine | None], ForwardPass]:
    """Return a function that runs a batch with a search engine; None: without reuse."""

    def run(batch: TokenBatch, strategy: SearchEngine | None) -> ForwardPass:
        allowed = np.ones(len(batch.lengths), dtype=bool)
        with threads_of(engine.model, engine.threads):
            return forward_pass(engine.model, batch, strategy, allowed)

    return run


def _records(search: SearchEngine, batch: TokenBatch) -> list[tuple[Segment, np.ndarray]]:
    """Return the records of the texts of a batch: for each length, the segment and int64 [texts]."""
    found = []
    for group in batch.groups():
        segment = search.store.segments[group.length]
        rows = batch.ids.numpy()[group.tokens].reshape(-1, group.length)
        found.append((segment, np.array([segment.record_of(ids) for ids in rows], dtype=np.int64)))
    return found


def _drop(found: Sequence[tuple[Segment, np.ndarray]]) -> None:
    """Drop the segments of records from memory, and let the segments look again."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for segment, _ in found:
        # Pages that a process has mapped are not dropped from the page cache.
        size = len(segment) * segment.layout.record_bytes(segment.length)
        libc.madvise(int(segment.addresses(np.zeros(1, np.int64))[0]), size, _MADV_DONTNEED)
        os.posix_fadvise(segment.file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        segment._warm_until[:] = 0
        segment._was_cold[:] = False


def _look_microseconds(search: SearchEngine, batch: TokenBatch, *, known: bool = False) -> float:
    """Return the median time per text to look whether the records of a batch are in memory.

    known: whether the records were found in memory within the last second.
    """
    found, taken = _records(search, batch), []
    for _ in range(_LOOKS):
        for segment, _ in found:
            if not known:
                segment._warm_until[:] = 0
        started = time.perf_counter()
        for segment, records in found:
            segment.are_cold(records, 0.0)
        taken.append((time.perf_counter() - started) / len(batch.lengths))
    return statistics.median(taken) * 1e6
