"""Show what a tuning measured: as a table, and as the comment of a settings file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click

from attncache_core.evaluation.tuning.measuring import MeasuredWay
from attncache_core.evaluation.tuning.tune import TuneReport
from attncache_core.evaluation.tuning.ways import EXACT
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget
from service.commands.report import machine, show_machine, show_table

# The first line of a settings file, by which a later tuning knows that it may replace the file.
WRITTEN_BY = "Written by `attncache tune`, which replaces this file when it runs again."
_WIDTH = 100
_OF_TEXTS = ("fingerprint", "texts", "texts of int8", "database", "policy")


def show_report(report: TuneReport) -> None:
    """Print the machine, the table with the fastest way first, and what was chosen."""
    show_machine(_facts(report))
    columns, rows = table(report)
    show_table(_measuring(report), columns, rows)
    for name, reason in report.failed.items():
        click.echo(f"not measured: {name}: {reason}")
    for line in conclusion(report):
        click.echo(line)


def table(report: TuneReport) -> tuple[list[str], list[list[str]]]:
    """Return the columns and a row for each way, the fastest first. The chosen way is marked with *.

    The lower bound of the mean decides whether a way is inside the budget. Speeds are ratios to the exact
    model: of full batches, and of one text alone. MB are of the weights.
    """
    agrees = report.budget.measure is Measure.AGREEMENT
    has_accuracy = any(measured.accuracy is not None for measured in report.measured)
    has_hits = any(measured.way.maps for measured in report.measured)
    columns = ["way", str(report.budget.measure), "95 % bound"]
    columns += [] if agrees else ["99 of 100"]
    columns += ["accuracy"] if has_accuracy else []
    columns += ["speed", "one text", "MB"]
    columns += ["hits"] if has_hits else []
    rows = []
    for measured in sorted(report.measured, key=lambda measured: -measured.speed):
        quality = measured.quality
        row = [f"{'* ' if measured is report.chosen else ''}{measured.way.name}"]
        row += [f"{quality.mean:.4f}", f"{quality.lower_bound:.4f}"]
        row += [] if agrees else ["-" if quality.floor is None else f"{quality.floor:.4f}"]
        row += ["-" if measured.accuracy is None else f"{measured.accuracy:.4f}"] if has_accuracy else []
        row += [f"{measured.speed:.2f}", f"{measured.speed_alone:.2f}", f"{measured.weight_bytes / 1e6:,.0f}"]
        row += [f"{measured.hit_rate:.0%}" if measured.way.maps else ""] if has_hits else []
        rows.append([*row, "inside" if quality.keeps(report.budget) else "outside"])
    return [*columns, "budget"], rows


def conclusion(report: TuneReport) -> Iterator[str]:
    """Yield the speed of the exact model, the budget and what was chosen, in lines."""
    exact = report.measured[0]
    alone = f"{exact.milliseconds_alone:.2f} ms for one text"
    yield f"exact: {exact.texts_per_second:,.0f} texts/s in full batches, {alone}"
    yield f"budget, which the 95 % bound of a way must keep: {_in_words(report.budget)}"
    chosen = report.chosen
    if chosen is None:
        yield "no way keeps the budget: serve in float32"
    elif chosen.way.name == EXACT:
        yield "chosen: exact, because nothing inside the budget pays"
    else:
        yield f"chosen: {chosen.way.name}: {_gain(chosen)}"


def comment(report: TuneReport) -> Iterator[str]:
    """Yield the lines of the comment of a settings file: what was measured, where, and what was chosen."""
    yield WRITTEN_BY
    yield from conclusion(report)
    yield f"measured on {_measuring(report)}; the other {report.choosing} texts were not measured"
    yield from textwrap.wrap(", ".join(f"{name} {fact}" for name, fact in _facts(report).items()), _WIDTH)
    yield ""
    columns, rows = table(report)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in [columns, *rows]:
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells)
    for name, reason in report.failed.items():
        yield f"not measured: {name}: {reason}"
    yield ""


def line_of(measured: MeasuredWay) -> str:
    """Return the figures of a way in one line."""
    return f"{measured.way.name}: quality {measured.quality.mean:.4f}, {_gain(measured)}"


def _measuring(report: TuneReport) -> str:
    # Whether the operator's database was made from some of them, its records and digests tell only in part.
    return f"{report.measuring} {'' if report.inputs['database'] else 'held-out '}texts"


def _in_words(budget: Budget) -> str:
    """Return a budget in one line."""
    if budget.measure is Measure.AGREEMENT:
        return f"at least {budget.least} of the decisions are those of the model in float32"
    floor = f", and {budget.floor} for 99 of 100 texts" if budget.floor else ""
    return f"mean cosine to the model in float32 at least {budget.least}{floor}"


def _gain(measured: MeasuredWay) -> str:
    return f"batches {measured.speed:.2f} times as fast, one text {measured.speed_alone:.2f} times"


def _facts(report: TuneReport) -> dict[str, object]:
    """Return the machine and its versions, and what else decided the figures."""
    facts = machine(report.inputs["threads"])
    others = {name: fact for name, fact in report.inputs.items() if name not in {*facts, *_OF_TEXTS}}
    return {**facts, **others}
