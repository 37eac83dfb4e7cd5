"""`http`: measure the speed of any server with OpenAI's or TEI's API."""

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
from attncache_core.corpus.tables import read_rows
from attncache_core.runtime.threads import available_processors
from service.commands.options import json_option
from service.commands.progress import shown_progress
from service.commands.report import machine, show_machine, show_table, write_json

if TYPE_CHECKING:
    from benchmarks.measuring.http import Api, Endpoint, Measurement

_APIS: dict[str, Api | None] = {"auto": None, "openai": "openai", "tei": "tei"}
_COLUMNS = ("clients", "batch", "texts/s", "p50 ms", "p95 ms", "p99 ms", "errors")
_HEADER = re.compile(r"([\w!#$%&'*+.^`|~-]+):[ \t]*([^\r\n\0]*)", re.ASCII)
_INTERRUPTED = 130  # the shell's exit code for a program that Ctrl-C ended


def _headers(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for value in values:
        found = _HEADER.fullmatch(value)
        if not found:
            # The message does not repeat the header, because its value may be a secret.
            raise click.BadParameter("must be 'NAME: VALUE'")
        headers[found[1]] = found[2]
    return headers


@click.command("http")
@click.option("--url", required=True, help="Address of the server, or the full address of its endpoint.")
@click.option(
    "--texts", "texts_file", required=True, help="File with one text per line; - reads standard input."
)
@click.option(
    "--clients",
    type=click.IntRange(min=1),
    multiple=True,
    default=(16,),
    show_default=True,
    help="Number of concurrent clients. May be repeated, for one row each.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1,),
    show_default=True,
    help="Number of texts in a request. May be repeated, for one row each.",
)
@click.option(
    "--total", type=click.IntRange(min=1), default=4000, show_default=True, help="Number of texts per row."
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=200,
    show_default=True,
    help="Number of texts that are sent before each row and not counted.",
)
@click.option(
    "--api",
    type=click.Choice(tuple(_APIS)),
    default="auto",
    show_default=True,
    help="API of the server: OpenAI's or TEI's. auto uses the API that answers.",
)
@click.option(
    "--model", default="default", show_default=True, help="Name of the model in requests of OpenAI's API."
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    callback=_headers,
    metavar="NAME: VALUE",
    help="HTTP header of each request. May be repeated. Default: none.",
)
@click.option(
    "--zipf",
    type=click.FloatRange(min=0),
    help="Draw the texts by Zipf's law with this exponent, so that some texts are frequent. Default: each "
    "text as often as the others.",
)
@json_option
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
    zipf: float | None,
    json_file: Path | None,
) -> None:
    """Measure texts per second and latency of a server.

    Each client sends a request when it has received the response to its last request. The server must have
    OpenAI's /v1/embeddings or TEI's /embed. There is a row for each number of clients and each batch size.
    Only texts with status 200 count; errors are counted by kind. Ctrl-C ends the measurement and shows the
    rows so far.
    """
    try:
        from benchmarks.measuring.http import Load, find_endpoint, measure
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise click.UsageError(
            "the benchmark needs aiohttp; install it: pip install -e '.[bench]'"
        ) from error
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
                    Load(*pair, total, zipf),
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
    # Shuffled, because neighbours in a file are often similar. The order is fixed, so that runs compare.
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
