"""Show the result of an evaluation: on the terminal, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attncache_core.evaluation.comparison import MethodReport
from service.commands.report import show_machine, show_table, write_json


def show_comparison(
    metric: str,
    facts: Mapping[str, Any],
    reports: Sequence[MethodReport],
    json_file: Path | None,
    markdown: Path | None,
) -> None:
    """Print a table with a column for each method, and write it to the given files."""
    columns = ["", *(report.method for report in reports)]
    rows = _rows(metric, reports)
    show_machine(facts)
    show_table(f"{facts['texts']} texts", columns, rows)
    if markdown:
        write_markdown(markdown, columns, rows)
    methods = [without_nan(asdict(report)) for report in reports]
    write_json(json_file, {"machine": facts, "metric": metric, "methods": methods})


def write_markdown(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table as Markdown. The first column is text; the other columns are figures."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    path.write_text(table + "\n", encoding="utf-8")


def _rows(metric: str, reports: Sequence[MethodReport]) -> list[list[str]]:
    """Return a row for each figure, with its value for each method. Rows without any value are omitted."""
    rows = [
        [f"{metric} {name}", *(f"{report.scores[name]:.4f}" for report in reports)]
        for name in reports[0].scores
    ]
    if len(rows) > 1:
        rows.append([f"{metric}, mean", *(f"{report.score:.4f}" for report in reports)])
    figures: dict[str, Callable[[MethodReport], str]] = {
        "difference to the full model, from": lambda report: _end(report, 0),
        "to (95 %, paired)": lambda report: _end(report, 1),
        "hits": lambda report: f"{report.hit_rate:.3f}",
        "hits by prototypes": lambda report: f"{report.prototype_hit_rate:.3f}",
        "recorded texts": lambda report: str(report.recorded),
        "cosine of the hits": lambda report: _number(report.cosine),
        "5th percentile": lambda report: _number(report.cosine_5th_percentile),
        "agreement of the hits": lambda report: _number(report.agreement),
        "seconds": lambda report: f"{report.seconds:.2f}",
        "in attention and search": lambda report: f"{report.attention_seconds:.2f}",
        "in search": lambda report: f"{report.search_seconds:.2f}",
        "speed-up": lambda report: f"{report.speedup:.3f}",
        "speed-up of attention": lambda report: f"{report.attention_speedup:.3f}",
        "γ": lambda report: "" if report.gamma is None else f"{report.gamma:.3f}",
    }
    rows += [[name, *map(figure, reports)] for name, figure in figures.items()]
    return [row for row in rows if any(row[1:])]


def _end(report: MethodReport, end: int) -> str:
    return f"{report.difference_interval[end]:+.4f}" if report.difference_interval else ""


def _number(value: float) -> str:
    return "" if value != value else f"{value:.4f}"


def without_nan(value: Any) -> Any:
    """Replace NaN by None, because JSON has no NaN. NaN stands for a value that could not be measured."""
    if isinstance(value, dict):
        return {name: without_nan(of_name) for name, of_name in value.items()}
    if isinstance(value, tuple):
        return [without_nan(each) for each in value]
    return None if value != value else value
