"""Plot what a quality budget buys. Each plot is a PNG file with its data in a CSV file of the same name."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attncache_core import InvalidInput
from attncache_core.evaluation.tuning.tune import TuneReport

_SIZE = (7.0, 4.5)
WAY_COLUMNS = ("way", "speed", "speed_alone", "quality", "lower_bound")


class Plots:
    """Writes plots and their data into one folder."""

    def __init__(self, folder: Path, measure: str) -> None:
        """measure: the name of the quality measure, for the axes.

        Raises InvalidInput if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise InvalidInput(
                "plots need matplotlib: pip install 'attncache[plots]'", field="output"
            ) from error
        self._figure = Figure
        self._folder, self._measure = folder, measure
        folder.mkdir(parents=True, exist_ok=True)

    def ways(self, report: TuneReport, name: str) -> None:
        """Plot quality against speed of the ways that a tuning measured, in the files with this name."""
        rows = [
            (
                measured.way.name,
                measured.speed,
                measured.speed_alone,
                measured.quality.mean,
                measured.quality.lower_bound,
            )
            for measured in report.measured
        ]
        self._write(name, WAY_COLUMNS, rows)
        figure, axes = self._axes(
            "speed in full batches, relative to the exact model", f"mean {report.budget.measure} of all texts"
        )
        axes.axhline(report.budget.least, color="grey", linewidth=1, linestyle="--", label="budget")
        for measured in report.measured:
            marker = "*" if measured is report.chosen else "o"
            outside = not measured.quality.keeps(report.budget)
            filling = {"facecolors": "none", "edgecolors": "black"} if outside else {}
            axes.scatter(measured.speed, measured.quality.mean, marker=marker, **filling)
            axes.annotate(
                measured.way.name,
                (measured.speed, measured.quality.mean),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
            )
        axes.margins(0.15)
        axes.legend()
        self._save(figure, name)

    def _axes(self, x: str, y: str) -> tuple[Any, Any]:
        figure = self._figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        return figure, axes

    def _save(self, figure: Any, name: str) -> None:
        figure.savefig(self._folder / f"{name}.png", dpi=120)

    def _write(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        with (self._folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)
