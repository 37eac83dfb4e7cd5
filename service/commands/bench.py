"""`attncache bench`: speed of the engine, the index and a server."""

from __future__ import annotations

import click


@click.group("bench")
def bench() -> None:
    """Measure speed and memory, beside what one would use instead."""
