"""`figures`: measure the figures of the documentation, and write them into its pages.

A figure is a command and a block of a page, between `<!-- figure NAME -->` and `<!-- end -->`:

    command in a process of its own -> build/figures/NAME.json -> Markdown -> the block in the page

A result that is kept there is not measured again, so a run that was stopped continues.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click

from attncache_core.runtime.files import write_whole
from attncache_core.runtime.threads import available_processors
from benchmarks.commands import drift
from service.commands.report import machine

Report = Mapping[str, Any]

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Figure:
    """One block of a page, and the command that measures what stands in it.

    `arguments` may name files as `{data}/NAME`, `{models}/NAME` and `{build}/NAME`. `rendered` makes Markdown
    of the report that the command writes with `--json`; None: the block shows what the command prints.
    """

    page: str
    name: str
    arguments: str
    rendered: Callable[[Report], str] | None = None

    @property
    def shown_command(self) -> str:
        """The command as a reader types it: files are named without their folders."""
        return "python -m benchmarks " + re.sub(r"\{\w+\}/", "", self.arguments)


@dataclass(frozen=True)
class Folders:
    """Where the pages, the results, the data and the models lie."""

    pages: Path
    results: Path
    data: Path | None = None
    models: Path | None = None

    def command(self, figure: Figure, report: Path) -> list[str] | None:
        """Return the command of a figure; None if a folder that it needs was not given."""
        named = {"data": self.data, "models": self.models, "build": self.results}
        if any(f"{{{name}}}" in figure.arguments and folder is None for name, folder in named.items()):
            return None
        words = [word.format(**named) for word in shlex.split(figure.arguments)]
        report_option = ["--json", str(report)] if figure.rendered else []
        return [sys.executable, "-m", "benchmarks", *words, *report_option]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. The first column is text; the other columns are figures."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def number(value: float | None, digits: int) -> str:
    """Return a number with this many digits behind the point, or an empty cell for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def engines(report: Report) -> str:
    """Return thousand tokens per second of each engine, and milliseconds of one sequence."""
    shapes = list(
        dict.fromkeys(name for row in report["rows"] for name in row["milliseconds"] if name != "texts")
    )

    def cell(row: Report, name: str) -> str:
        taken = row["milliseconds"].get(name)
        sequences, length = map(int, name.split("x"))
        return number(taken if sequences == 1 or taken is None else sequences * length / taken, 2)

    columns = [
        "engine",
        *(f"{name}, ms" if name.startswith("1x") else name for name in shapes),
        "cosine to fp32",
    ]
    rows = [
        [row["peer"], *(cell(row, name) for name in shapes), number(row["cosine"], 5)]
        for row in report["rows"]
    ]
    return table(columns, rows)


def index(report: Report) -> str:
    """Return build time, memory, search time and recall of the index."""
    columns = [
        "vectors",
        "kind",
        "build, s",
        "MiB",
        "1 query, ms (p95)",
        "many, ms (p95)",
        "recall@1",
        "farther by",
    ]
    return table(
        columns,
        [
            [
                f"{row['vectors']:,}",
                row["cloud"],
                number(row["build_seconds"], 2),
                number(row["index_bytes"] / 2**20, 1),
                *(f"{row[key]['median']:.3f} ({row[key]['p95']:.3f})" for key in ("one", "many")),
                number(row["recall"], 3),
                f"{row['excess']:.2%}",
            ]
            for row in report["reports"]
        ],
    )


def prefixes(report: Report) -> str:
    """Return the speed of prompts with stored prefixes, and what storing costs where nothing is shared."""
    keys = ("method", "batch", "texts_per_second", "speed_up", "least_speed_up", "computed_tokens")
    digits = dict(zip(keys[2:], (2, 2, 2, 0), strict=True))
    rows = [
        [number(row[key], digits[key]) if key in digits else row[key] for key in keys]
        for row in report["rows"]
    ]
    costs = [[row["batch"], number((row["ratio"] - 1) * 100, 1), row["pairs"]] for row in report["overhead"]]
    measured = table(["method", "batch", "texts/s", "speed-up", "least of a round", "computed tokens"], rows)
    return f"{measured}\n\n{table(['batch of texts that share nothing', 'storing costs, %', 'pairs'], costs)}"


def sessions(report: Report) -> str:
    """Return hits and speed of each store of conversations."""
    rows = [
        [
            row["store"],
            f"{row['memory_hit_rate']:.2f} + {row['disk_hit_rate']:.2f}",
            *(number(row[key], 2) for key in ("tokens_per_second", "speed_up", "p50_seconds", "p95_seconds")),
        ]
        for rate in report["rates"]
        for row in rate["rows"]
    ]
    return table(["store", "hits in memory + on disk", "tokens/s", "speed-up", "p50, s", "p95, s"], rows)


def month(report: Report) -> str:
    """Return the totals of databases that follow the traffic, and what follows from them."""
    view = "with verification"
    _, columns, rows = next(found for found in drift.tables(report) if found[0] == view)
    return f"{view}:\n\n{table(columns, rows)}\n\n{report['decision']}"


_PEERS = " ".join(
    f'--peer "{name}"'
    for name in (
        *(f"attncache {kind}" for kind in ("fp32", "bf16", "int8")),
        *(f"openvino {kind}" for kind in ("fp32", "bf16", "int8")),
        "ctranslate2 int8",
        "attncache, all hit",
    )
)
_LLAMA = "{build}/random/llama-3.2-1b"
FIGURES = (
    Figure("benchmarks.md", "engine", f"engine --rounds 4 --threads 2 {_PEERS}", engines),
    Figure(
        "benchmarks.md",
        "deberta",
        'engine --model {models}/deberta-minilm --threads 2 --rounds 3 --peer "attncache bf16"'
        ' --peer "openvino bf16" --peer "attncache int8" --peer "openvino int8" --peer "attncache fp32"'
        ' --peer "openvino fp32"',
        engines,
    ),
    Figure("benchmarks.md", "index", "index", index),
    Figure("benchmarks.md", "first-starts", "first-starts --starts 5"),
    Figure("benchmarks.md", "plain-executor", "plain-executor"),
    Figure("quality.md", "larger-shapes", "model-sizes --lengths 16 32 128 512 --rounds 3 --threads 2"),
    Figure("kv.md", "llama-shape", "model-sizes --model llama-3.2-1b --write {build}/random"),
    Figure(
        "quality.md",
        "drift",
        "drift --model {models}/deberta-minilm --threads 1 --data {data}/banking77_train.tsv"
        " --data {data}/SST2_train.tsv:sentence --data {data}/STSB_train.tsv:sentence1,sentence2"
        " --output {build}/drift",
        month,
    ),
    Figure(
        "kv.md",
        "prefix",
        f"prefix --model {_LLAMA} --texts 6 --batch 6 --rounds 3 --peer transformers --peer llama.cpp",
        prefixes,
    ),
    Figure(
        "kv.md",
        "sessions",
        f"sessions --model {_LLAMA} --uniform --turns 6 --turn-tokens 100 --think-seconds 10 --rate 0.3"
        " --sessions 12",
        sessions,
    ),
    Figure(
        "kv.md",
        "kv-truncation",
        "kv-truncation {models}/tiny-prompt-llama {data}/SST2_train.tsv:sentence",
    ),
)


def with_block(text: str, name: str, content: str) -> str:
    """Replace the block of a figure in a page. Raises ValueError if there is not one such block."""
    start = f"<!-- figure {name} -->"
    pattern = rf"(?s){re.escape(start)}\n.*?<!-- end -->"
    replaced, count = re.subn(pattern, lambda _: f"{start}\n{content}\n<!-- end -->", text)
    if count != 1:
        raise ValueError(f"the page has {count} blocks for the figure {name}, not 1")
    return replaced


def block(figure: Figure, result: Report) -> str:
    """Return the Markdown of a figure: its command, its figures, and where and when they were measured."""
    shown = figure.rendered(result["report"]) if figure.rendered else f"```\n{result['printed'].strip()}\n```"
    facts = ", ".join(f"{name} {fact}" for name, fact in result["machine"].items())
    return f"    {figure.shown_command}\n\n{shown}\n\nMeasured on {result['date']}: {facts}."


def measured(figure: Figure, folders: Folders) -> Report | None:
    """Run the command of a figure and keep its result. Returns None if the command fails."""
    with tempfile.TemporaryDirectory(prefix="attncache-figures-") as folder:
        path = Path(folder) / "report.json"
        command = folders.command(figure, path)
        assert command is not None
        # Tables are not broken at the width of this screen.
        environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
        done = subprocess.run(
            command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, env=environment, check=False
        )
        if done.returncode:
            click.echo(f"{figure.name} failed with exit code {done.returncode}; {figure.page} is unchanged")
            return None
        report = json.loads(path.read_text("utf-8")) if figure.rendered else {}
    facts = report.get("machine", machine(available_processors()))
    shown = {key: fact for key, fact in facts.items() if key != "model"}
    return {
        "command": figure.arguments,
        "date": date.today().isoformat(),
        "machine": shown,
        "report": report,
        "printed": done.stdout,
    }


def kept(figure: Figure, folders: Folders) -> Report | None:
    """Return the kept result of a figure; None if there is none of its present command."""
    path = folders.results / f"{figure.name}.json"
    if not path.exists():
        return None
    result: Report = json.loads(path.read_text("utf-8"))
    return result if result["command"] == figure.arguments else None


def write_figures(figures: Sequence[Figure], folders: Folders, *, again: bool) -> bool:
    """Measure the figures without a kept result (`again`: all), and write each into its page."""
    complete = True
    folders.results.mkdir(parents=True, exist_ok=True)
    for done, figure in enumerate(figures, 1):
        click.echo(f"{done}/{len(figures)} {figure.name}: {figure.shown_command}")
        if folders.command(figure, Path()) is None:
            click.echo(f"{figure.name} is left out: it needs --data or --models")
            continue
        page = folders.pages / figure.page
        with_block(page.read_text("utf-8"), figure.name, "")  # before hours are spent
        result = None if again else kept(figure, folders)
        if result is None:
            result = measured(figure, folders)
            if result is None:
                complete = False
                continue
            write_whole(folders.results / f"{figure.name}.json", json.dumps(result, indent=1).encode())
        with_figure = with_block(page.read_text("utf-8"), figure.name, block(figure, result))
        write_whole(page, with_figure.encode())
    return complete


@click.command("figures")
@click.option(
    "--only", "names", multiple=True, help="Figure to measure. May be repeated. Default: all figures."
)
@click.option(
    "--list", "listed", is_flag=True, help="List the figures with their pages and commands, and end."
)
@click.option("--again", is_flag=True, help="Measure anew what was measured. Default: use the kept results.")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the data sets. Default: figures that need data are left out.",
)
@click.option(
    "--models",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the small trained models. Default: figures that need them are left out.",
)
def figures(
    names: tuple[str, ...], listed: bool, again: bool, data: Path | None, models: Path | None
) -> None:
    """Measure the tables of the documentation, and write them into its pages. This takes hours.

    A run that was stopped continues when the same command is given again: results are kept in build/figures.
    """
    if unknown := set(names) - {figure.name for figure in FIGURES}:
        raise click.UsageError(f"no figure has the name {min(unknown)}; --list shows the names")
    chosen = [figure for figure in FIGURES if not names or figure.name in names]
    if listed:
        for figure in chosen:
            click.echo(f"{figure.name}  docs/{figure.page}  {figure.shown_command}")
        return
    folders = Folders(
        _ROOT / "docs",
        _ROOT / "build" / "figures",
        data.resolve() if data else None,
        models.resolve() if models else None,
    )
    if not write_figures(chosen, folders, again=again):
        raise SystemExit(1)
