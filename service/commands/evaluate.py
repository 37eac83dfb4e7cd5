"""`attncache evaluate`: what reuse costs in quality and saves in time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from attncache_core import AttentionDatabase, PrefillEngine, find_checkpoint
from attncache_core.corpus.reading import read_labelled
from attncache_core.engine import Dtype
from attncache_core.evaluation.classification import ClassificationReport, evaluate_classification
from service.commands.options import model_options
from service.commands.progress import shown_progress


@click.group("evaluate")
def evaluate() -> None:
    """Measure what reuse costs in quality and saves in time."""


@evaluate.command("classification")
@model_options
@click.option("--database", type=click.Path(path_type=Path), required=True)
@click.option("--heads", help="Override the database's reuse mask.")
@click.option("--threshold", type=float, help="Override the database's θ.")
@click.option("--train", required=True, help="Labelled texts to fit the linear classifier on.")
@click.option("--test", required=True, help="Labelled texts to measure on.")
@click.option("--text-column", default="text", show_default=True)
@click.option("--label-column", default="label", show_default=True)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Timed rounds, in turn."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the report here.")
def classification(
    model: str,
    dtype: Dtype,
    threads: int | None,
    database: Path,
    heads: str | None,
    threshold: float | None,
    train: str,
    test: str,
    text_column: str,
    label_column: str,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Accuracy of a linear classifier on embeddings, hit rate, cosine and time, with reuse off and on."""
    checkpoint = find_checkpoint(model)
    train_texts, test_texts = (read_labelled(path, text_column, label_column) for path in (train, test))
    opened = AttentionDatabase.open(database, heads=heads, threshold=threshold)
    full = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
    reusing = PrefillEngine.load(checkpoint, database=opened, dtype=dtype, threads=threads)
    with shown_progress() as progress:
        report = evaluate_classification(
            full,
            reusing,
            train_texts,
            test_texts,
            rounds=rounds,
            on_step=lambda done, total: progress("measuring", done, total),
        )
    _show(report)
    if json_file:
        json_file.write_text(json.dumps(_without_nan(asdict(report)), indent=1) + "\n", encoding="utf-8")


def _without_nan(report: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: what could not be measured is null."""
    return {name: None if value != value else value for name, value in report.items()}


def _show(report: ClassificationReport) -> None:
    table = Table("", "full model", "with reuse", title=f"{report.texts} texts", title_justify="left")
    table.add_row("accuracy", f"{report.accuracy_full:.4f}", f"{report.accuracy_reuse:.4f}")
    table.add_row("accuracy on hits", f"{report.hits_accuracy_full:.4f}", f"{report.hits_accuracy_reuse:.4f}")
    table.add_row("agreement on hits", "", f"{report.agreement_on_hits:.4f}")
    table.add_row("mean cosine on hits", "", f"{report.mean_cosine:.4f}")
    table.add_row("5th percentile", "", f"{report.cosine_5th_percentile:.4f}")
    table.add_row("hit rate", "", f"{report.hit_rate:.4f}")
    table.add_row("recorded texts", "", str(report.recorded_texts))
    table.add_row("reused heads", "", f"{report.reused_heads} of {report.heads}")
    table.add_row("threshold θ", "", f"{report.threshold:.4f}")
    table.add_row("seconds (median)", f"{report.full_seconds:.3f}", f"{report.reuse_seconds:.3f}")
    table.add_row("of which search", "", f"{report.search_seconds:.3f}")
    table.add_row("speed-up, all traffic", "", f"{report.speedup:.3f}")
    Console(highlight=False).print(table)
