"""Show the progress of long work: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from attncache_core import Progress as Report
from service.bulk.sharded import Counts

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def shown_progress() -> Iterator[Report]:
    """Yield a callable that shows (stage, done, total) on stderr."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        yield show


@contextmanager
def shown_share(stage: str) -> Iterator[Callable[[int, float], None]]:
    """Yield a callable that shows how many rows are done and which share of a file they are, on stderr."""
    if not sys.stderr.isatty():
        yield _share_lines(stage)
        return
    counted = TextColumn("{task.fields[rows]:,} rows")
    columns = (BarColumn(), TaskProgressColumn(), counted, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(stage), *columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(stage, total=1.0, rows=0)
        yield lambda rows, share: bars.update(task, completed=share, rows=rows)


@contextmanager
def shown_shards(stage: str) -> Iterator[Callable[[Counts], None]]:
    """Yield a callable that prints on stderr, every few seconds, how many shards are done."""
    last_line = float("-inf")

    def show(counts: Counts) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
            print(f"{stage}: {counts.computed} shards, {counts.rows} rows", file=sys.stderr, flush=True)
            last_line = time.monotonic()

    yield show


def _share_lines(stage: str) -> Callable[[int, float], None]:
    """Return a callable that prints a line every few seconds."""
    last_line = float("-inf")

    def show(rows: int, share: float) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
            print(f"{stage}: {rows} rows, {share:.0%}", file=sys.stderr, flush=True)
            last_line = time.monotonic()

    return show


def _lines() -> Report:
    """Return a callable that prints a line when a stage begins and ends, and every few seconds between."""
    last_line: dict[str, float] = {}

    def show(stage: str, done: int, total: int) -> None:
        due = time.monotonic() - last_line.get(stage, float("-inf")) >= _SECONDS_BETWEEN_LINES
        if due or done == total:
            print(f"{stage}: {done}/{total}", file=sys.stderr, flush=True)
            last_line[stage] = time.monotonic()

    return show
