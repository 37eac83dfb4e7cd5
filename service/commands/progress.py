"""Show the progress of long work: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
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
        # For each stage, a line when it begins and ends, and every few seconds between.
        lines = defaultdict[str, _Lines](_Lines)
        yield lambda stage, done, total: lines[stage].show(f"{stage}: {done}/{total}", always=done == total)
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
def shown_share(stage: str) -> Iterator[Callable[[int, float | None], None]]:
    """Yield a callable that shows how many rows are done and which share of a file they are, on stderr.

    A share of None is not shown.
    """
    if not sys.stderr.isatty():
        line = _Lines()
        yield lambda rows, share: line.show(
            f"{stage}: {rows} rows" + ("" if share is None else f", {share:.0%}")
        )
        return
    counted = TextColumn("{task.fields[rows]:,} rows")
    columns = (BarColumn(), TaskProgressColumn(), counted, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(stage), *columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(stage, total=None, rows=0)
        yield lambda rows, share: bars.update(
            task, total=None if share is None else 1.0, completed=share, rows=rows
        )


def shown_shards(stage: str) -> Callable[[Counts], None]:
    """Return a callable that prints on stderr, every few seconds, how many shards are done."""
    show = _Lines().show
    return lambda counts: show(f"{stage}: {counts.computed} shards, {counts.rows} rows")


class _Lines:
    """Prints lines on stderr, and leaves out those that come too soon after another one."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def show(self, line: str, *, always: bool = False) -> None:
        if always or time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            print(line, file=sys.stderr, flush=True)
            self._last = time.monotonic()
