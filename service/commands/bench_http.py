"""`attncache bench http`: speed of a server, this one or any that speaks OpenAI's or TEI's API."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attncache_core import InvalidInput
from attncache_core.corpus.reading import read_rows
from attncache_core.threads import available_processors
from service.bench.report import machine, show_machine, show_table, write_json
from service.commands.progress import shown_progress

if TYPE_CHECKING:
    from service.bench.http import Api, Endpoint, Measurement

_APIS: dict[str, Api | None] = {"auto": None, "openai": "openai", "tei": "tei"}
_COLUMNS = ("clients", "batch", "texts/s", "p50 ms", "p95 ms", "p99 ms", "errors")
_HEADER = re.compile(r"([\w!#$%&'*+.^`|~-]+):[ \t]*([^\r\n\0]*)", re.ASCII)
_INTERRUPTED = 130  # a shell's code for a program that was told to end by Ctrl-C


def _headers(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for value in values:
        found = _HEADER.fullmatch(value)
        if not found:
            # Its value may be a secret and is not repeated.
            raise click.BadParameter("must be 'NAME: VALUE'")
        headers[found[1]] = found[2]
    return headers


@click.command("http")
@click.option("--url", required=True, help="Where the server listens, or its endpoint's full address.")
@click.option("--texts", "texts_file", required=True, help="A file with a text a line; - is standard input.")
@click.option(
    "--clients",
    type=click.IntRange(min=1),
    multiple=True,
    default=(16,),
    show_default=True,
    help="Clients at a time; several times for several rows.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1,),
    show_default=True,
    help="Texts in a request; several times for several rows.",
)
@click.option("--total", type=click.IntRange(min=1), default=4000, show_default=True, help="Texts a row.")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=200,
    show_default=True,
    help="Texts before each row that are not counted.",
)
@click.option(
    "--api",
    type=click.Choice(tuple(_APIS)),
    default="auto",
    show_default=True,
    help="OpenAI's or TEI's API; auto takes what answers.",
)
@click.option(
    "--model", default="default", show_default=True, help="The model that OpenAI's API is asked for."
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    callback=_headers,
    metavar="NAME: VALUE",
    help="Sent with each request.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the report here.")
def bench_http(
    url: str,
    texts_file: str,
    clients: tuple[int, ...],
    batch: tuple[int, ...],
    total: int,
    warmup: int,
    api: str,
    model: str,
    headers: dict[str, str],
    json_file: Path | None,
) -> None:
    """Texts a second and latency of a server, each client asking again when it has its answer.

    Works with every server that has OpenAI's /v1/embeddings or TEI's /embed. A row for each number of clients
    with each batch. Only texts answered with 200 count; errors are counted by kind. Ctrl-C ends it and
    shows what was measured.
    """
    try:
        from service.bench.http import Load, find_endpoint, measure
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise click.UsageError("it needs aiohttp; install it: pip install 'attncache[bench]'") from error
    texts = _read_texts(texts_file)
    endpoint = asyncio.run(find_endpoint(url, _APIS[api], model=model, headers=headers))
    rows: list[Measurement] = []
    interrupted = False
    try:
        with shown_progress() as progress:
            for pair in itertools.product(clients, batch):
                measuring = measure(
                    endpoint,
                    texts,
                    Load(*pair, total),
                    warmup=warmup,
                    progress=progress,
                    on_measured=rows.append,
                )
                asyncio.run(measuring)
    except KeyboardInterrupt:
        interrupted = True
    facts = machine(available_processors())
    _show(endpoint, rows, interrupted)
    show_machine(facts)
    report = {"url": str(endpoint.url), "api": endpoint.api, "interrupted": interrupted, "machine": facts}
    write_json(json_file, {**report, "rows": [asdict(row) for row in rows]})
    if interrupted:
        sys.exit(_INTERRUPTED)


def _read_texts(path: str) -> list[str]:
    texts = [text for (text,) in read_rows(path, ("text",), "txt")]
    if not texts:
        raise InvalidInput(f"--texts: {path} has no texts", field="texts")
    # Neighbours in a file are often of one kind. The same order each time, so that runs compare.
    random.Random(0).shuffle(texts)
    return texts


def _show(endpoint: Endpoint, rows: Sequence[Measurement], interrupted: bool) -> None:
    title = f"{endpoint.url} ({endpoint.api}){', interrupted' if interrupted else ''}"
    show_table(title, _COLUMNS, map(_cells, rows))


def _cells(row: Measurement) -> tuple[object, ...]:
    percentiles = (_shown(row.p50_ms), _shown(row.p95_ms), _shown(row.p99_ms))
    errors = ", ".join(f"{kind}: {count}" for kind, count in row.errors.items()) or "none"
    return row.clients, row.batch, f"{row.texts_per_second:.1f}", *percentiles, errors


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.2f}"
