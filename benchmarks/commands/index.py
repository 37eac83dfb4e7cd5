"""`index`: measure the index of feature vectors alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from attncache_core.runtime.threads import available_processors
from benchmarks.measuring.index import Cloud, IndexReport, Milliseconds, measure
from service.commands.options import json_option
from service.commands.progress import shown_progress
from service.commands.report import machine, show_machine, show_table, write_json

_MEBIBYTE = 2**20


@click.command("index")
@click.option(
    "--vectors",
    "counts",
    type=click.IntRange(min=1),
    multiple=True,
    default=(100_000, 1_000_000),
    show_default=True,
    help="Number of vectors in the index. May be repeated, for one table each.",
)
@click.option(
    "--dimensions", type=click.IntRange(min=1), default=128, show_default=True, help="Dimensions of a vector."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of a search for many queries. Default: as many as the processor quota allows.",
)
@click.option(
    "--queries",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Number of queries in a search for many queries.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=200, show_default=True, help="Number of timed searches."
)
@json_option
def bench_index(
    counts: tuple[int, ...],
    dimensions: int,
    threads: int | None,
    queries: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Measure build time, memory, search time and recall of the index of feature vectors.

    Vectors are random, or form small or large clusters. Queries are new draws from the same distribution.
    """
    threads = threads or available_processors()
    facts = machine(threads)
    show_machine(facts)
    reports: list[IndexReport] = []
    for count in counts:
        with shown_progress() as progress:
            reports += [
                measure(cloud, count, dimensions, queries, threads, rounds, progress) for cloud in Cloud
            ]
        _show(reports[-len(Cloud) :], threads)
    write_json(json_file, {"machine": facts, "rounds": rounds, "reports": list(map(asdict, reports))})


def _show(reports: list[IndexReport], threads: int) -> None:
    """Print one table for all distributions with the same number of vectors."""
    first = reports[0]
    rows = {
        "partition": [report.partition for report in reports],
        "build, s": [f"{report.build_seconds:.2f}" for report in reports],
        "index, MiB": [_mebibytes(report.index_bytes) for report in reports],
        "process grew by, MiB": [_mebibytes(report.resident_bytes) for report in reports],
        "1 query, 1 thread, ms (p95)": [_milliseconds(report.one) for report in reports],
        f"{first.queries} queries, {threads} threads, ms (p95)": [
            _milliseconds(report.many) for report in reports
        ],
        "recall@1": [f"{report.recall:.3f}" for report in reports],
        "excess distance": [f"{report.excess:.2%}" for report in reports],
    }
    show_table(
        f"{first.vectors:,} vectors x {first.dimensions}",
        ["", *(report.cloud for report in reports)],
        [[name, *figures] for name, figures in rows.items()],
    )


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / _MEBIBYTE:,.1f}"


def _milliseconds(taken: Milliseconds) -> str:
    return f"{taken.median:.3f} ({taken.p95:.3f})"
