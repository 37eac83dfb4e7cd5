"""`drift`: whether a database that follows the traffic gains, in a simulated month."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from attncache_core import BuildOptions, Checkpoint, PrefillEngine
from attncache_core.checkpoints.checkpoint import Dtype
from attncache_core.corpus.reading import read_texts
from benchmarks.measuring.drift import (
    MIN_MORE_SAVED,
    Arm,
    ArmDay,
    Month,
    Simulation,
    Total,
    should_renew,
    total,
)
from benchmarks.measuring.month import month, shares_of_topics
from benchmarks.plots import DriftPlots
from service.commands.build import min_text_cosine_option
from service.commands.options import json_option, whole_model_options
from service.commands.progress import shown_progress
from service.commands.report import machine, show_machine, show_table, write_json

_defaults = BuildOptions()
_VIEWS = {"as calibrated": lambda day: day.calibrated, "with verification": lambda day: day.tightened}


@click.command("drift")
@whole_model_options
@click.option(
    "--data",
    "topics",
    required=True,
    multiple=True,
    metavar="FILE",
    help="Texts of a topic: FILE or FILE:column,column. Topics enter the traffic in the order given.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for what is measured, and for a plot (PNG) with its data (CSV). A month that was stopped "
    "continues there.",
)
@click.option("--days", type=click.IntRange(min=2), default=6, show_default=True, help="Days of the month.")
@click.option(
    "--sample-texts",
    type=click.IntRange(min=2),
    default=3400,
    show_default=True,
    help="Texts that each database is built from.",
)
@click.option(
    "--asked-texts",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Texts to serve per day.",
)
@click.option(
    "--half-life-days",
    type=click.FloatRange(min=0, min_open=True),
    default=7.0,
    show_default=True,
    help="Days after which a text has half its weight in the sample.",
)
@click.option(
    "--min-cosine",
    type=click.FloatRange(0, 1),
    default=_defaults.min_cosine,
    show_default=True,
    help="Quality budget: least mean cosine of the hits.",
)
@min_text_cosine_option("hits", "full model")
@click.option("--seed", default=0, show_default=True, help="Seed of all random choices.")
@json_option
def drift(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    topics: tuple[str, ...],
    output: Path,
    days: int,
    sample_texts: int,
    asked_texts: int,
    half_life_days: float,
    min_cosine: float,
    min_text_cosine: float,
    seed: int,
    json_file: Path | None,
) -> None:
    """Simulate a month in which topics enter the traffic, and measure whether renewing a database gains.

    The same texts are served with a database built from the first day, with a database that is built each
    night from a sample of the days before, and with a database built from other texts of the very day. Every
    hit is verified, and verification tightens as in a server.
    """
    engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
    facts = machine(engine.threads)
    show_machine(facts)
    options = BuildOptions(min_cosine=min_cosine, min_text_cosine=min_text_cosine, seed=seed)
    texts = _distinct(engine, [read_texts(source) for source in topics], options.max_length)
    drawn = month(texts, days, sample_texts, asked_texts, np.random.default_rng([seed, 0]))
    with shown_progress() as progress:
        simulation = Simulation(engine, Month(drawn, half_life_days, options, seed), output, progress)
        measured = []
        for day in simulation.run():
            measured.append(day)
            click.echo(_line(day), err=True)
        costs = simulation.costs()
    totals = {view: [total(arm, measured, served, costs) for arm in Arm] for view, served in _VIEWS.items()}
    static, _, daily = totals["with verification"]
    report = {
        "machine": facts,
        "shares": shares_of_topics(len(topics), days).tolist(),
        "days": [asdict(day) for day in measured],
        "totals": {view: [asdict(total) for total in of_view] for view, of_view in totals.items()},
        "costs": {shape: cost.as_json() for shape, cost in costs.items()},
        "renews": should_renew(static, daily),
        "decision": decision(static, daily),
    }
    for title, columns, rows in tables(report):
        show_table(title, columns, rows)
    click.echo(report["decision"])
    DriftPlots(output, "cosine").drift(measured, costs["full batch"])
    write_json(json_file, report)


def decision(static: Total, daily: Total) -> str:
    """Return in a sentence what follows from the arms with verification."""
    more = daily.saved["full batch"] - static.saved["full batch"]
    windows = f"in {daily.kept} of {daily.windows} windows, instead of {static.kept} of {static.windows}"
    verdict = "can pay" if should_renew(static, daily) else "is not built"
    return (
        f"A database built for each day saves {more:.2%} of the time more than the static database "
        f"({MIN_MORE_SAVED:.0%} is needed), and keeps the budget {windows}: sampling and renewing while "
        f"serving {verdict}."
    )


def _distinct(engine: PrefillEngine, topics: Sequence[Sequence[str]], max_length: int) -> list[list[str]]:
    """Return the texts of each topic whose tokens occur first there, without texts that are not recorded."""
    seen: set[tuple[int, ...]] = set()
    kept = []
    for texts in topics:
        of_file = []
        for text, ids in zip(texts, map(tuple, engine.tokenize(texts)), strict=True):
            if len(ids) <= max_length and ids not in seen:
                seen.add(ids)
                of_file.append(text)
        kept.append(of_file)
    return kept


def _line(day: ArmDay) -> str:
    built = f"built in {day.build_seconds:.0f} s" if day.built else "kept"
    figures = _day_cell(asdict(day.tightened))
    return f"day {day.day}, {day.arm}, {built}, {day.heads} heads: {figures}, steps {day.steps}"


def tables(report: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[object]]]]:
    """Return the tables of a report: title, columns and rows of each."""
    columns = [
        "database",
        "hits",
        "mean cosine",
        "hits below the floor",
        "windows that keep the budget",
        "time saved, full batches",
        "time saved, single texts",
        "seconds of a build",
        "of a processor's day",
    ]
    totals = report["totals"].items()
    by_day: dict[int, list[str]] = {}
    for day in report["days"]:
        cell = f"{day['heads']} heads; {_day_cell(day['tightened'])}"
        by_day.setdefault(day["day"], []).append(cell)
    rows: list[list[object]] = [
        [f"{day}: {' + '.join(f'{share:.0%}' for share in report['shares'][day - 1] if share)}", *cells]
        for day, cells in by_day.items()
    ]
    return [
        *((view, columns, [_total_row(total) for total in of_view]) for view, of_view in totals),
        (
            "with verification, by day: heads; share of hits; their mean cosine; hits below the floor; "
            "windows that keep the budget",
            ["day: shares of the topics", *Arm],
            rows,
        ),
    ]


def _total_row(total: Mapping[str, Any]) -> list[object]:
    return [
        str(total["arm"]),
        f"{total['hit_rate']:.3f}",
        _cosine(total["mean"]),
        f"{total['below']:.2%}",
        f"{total['kept']} of {total['windows']}",
        *(f"{total['saved'][shape]:.2%}" for shape in ("full batch", "one text")),
        f"{total['build_seconds']:.0f}",
        f"{total['build_share']:.2%}",
    ]


def _day_cell(served: Mapping[str, Any]) -> str:
    hit_rate = served["hits"] / served["texts"]
    windows = f"{served['kept']} of {served['windows']}"
    return f"{hit_rate:.3f}; {_cosine(served['mean'])}; {served['below']}; {windows}"


def _cosine(mean: float | None) -> str:
    return "" if mean is None else f"{mean:.4f}"
