"""`attncache bench`: measure the speed of the engine, the index and a server."""

from __future__ import annotations

import click

from service.commands.bench_engine import engine
from service.commands.bench_http import bench_http
from service.commands.bench_index import bench_index


@click.group("bench")
def bench() -> None:
    """Measure speed and memory, beside other engines and servers."""


bench.add_command(engine)
bench.add_command(bench_http)
bench.add_command(bench_index)
