"""Show the progress of long work: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attncache_core import Progress as Report

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


def _lines() -> Report:
    """Return a callable that prints a line when a stage begins and ends, and every few seconds between."""
    last_line: dict[str, float] = {}

    def show(stage: str, done: int, total: int) -> None:
        due = time.monotonic() - last_line.get(stage, float("-inf")) >= _SECONDS_BETWEEN_LINES
        if due or done == total:
            print(f"{stage}: {done}/{total}", file=sys.stderr, flush=True)
            last_line[stage] = time.monotonic()

    return show
