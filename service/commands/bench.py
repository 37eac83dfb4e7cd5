"""`attncache bench`: measure the engine, the index, a server, and what stored keys and values save."""

from __future__ import annotations

import click

from service.commands.bench_blend import bench_blend
from service.commands.bench_engine import engine
from service.commands.bench_http import bench_http
from service.commands.bench_index import bench_index
from service.commands.bench_prefix import bench_prefix
from service.commands.bench_sessions import bench_sessions


@click.group("bench")
def bench() -> None:
    """Measure speed and memory, beside other engines and servers."""


bench.add_command(engine)
bench.add_command(bench_blend)
bench.add_command(bench_http)
bench.add_command(bench_index)
bench.add_command(bench_prefix)
bench.add_command(bench_sessions)
