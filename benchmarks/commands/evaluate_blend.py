"""`evaluate blend`: quality and time of prompts whose chunks are reused in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from attncache_core import Checkpoint, InvalidInput, PrefillEngine
from attncache_core.checkpoints.checkpoint import Dtype
from attncache_core.corpus.reading import read_labelled, spread
from attncache_core.reuse.blend.chunks import Recomputation
from attncache_core.reuse.kv.opening import KeyValueOptions
from benchmarks.papers.blend_cases import (
    Case,
    Labelled,
    example_cases,
    question_cases,
    read_questions,
)
from benchmarks.papers.blending import (
    RANDOM_RATIO,
    RATIOS,
    MethodReport,
    compare_blending,
    smallest_ratio,
)
from benchmarks.plots import PaperPlots
from service.commands.evaluation import without_nan, write_markdown
from service.commands.options import json_option, max_tokens_option, model_options
from service.commands.progress import shown_progress
from service.commands.report import machine_and_model, show_machine, show_table, write_json


def ratios_of(
    _context: click.Context | None, _option: click.Parameter | None, written: str
) -> tuple[float, ...]:
    """Return the recompute ratios of a text like 0,0.15,0.3, rising, each once.

    Raises InvalidInput for another form, or for a number outside 0 to 1.
    """
    try:
        found = sorted({float(part) for part in written.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 <= ratio <= 1 for ratio in found):
        raise InvalidInput("ratios must be numbers from 0 to 1, separated by commas", field="ratios")
    return tuple(found)


@click.command("blend")
@model_options
@max_tokens_option
@click.option(
    "--data",
    required=True,
    metavar="FILE",
    help="Table of questions with columns question and paragraphs_json; the paragraphs are the chunks. With "
    "--examples: labelled texts, FILE:TEXT,LABEL.",
)
@click.option(
    "--examples",
    metavar="FILE:TEXT,LABEL",
    help="Labelled examples, which are the chunks in front of each text: a file and its columns of texts and "
    "labels. Default: --data has paragraphs.",
)
@click.option(
    "--shots",
    type=click.IntRange(min=2),
    default=6,
    show_default=True,
    help="Number of examples in front of a text.",
)
@click.option(
    "--pool",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Number of examples that are drawn from, taken evenly from all examples.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the drawn examples and their order."
)
@click.option(
    "--chunks",
    type=click.IntRange(min=2),
    help="Most paragraphs of a question, taken evenly. Default: as many as fit into the model.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    help="Cut each paragraph to this number of tokens. Default: paragraphs are not cut.",
)
@click.option(
    "--separator",
    default="\n",
    show_default=r"\n",
    help="Text between chunks, and between the last chunk and the query.",
)
@click.option(
    "--ratios",
    default=",".join(f"{ratio:g}" for ratio in RATIOS),
    show_default=True,
    callback=ratios_of,
    help="Shares of the reused tokens to compute again, separated by commas.",
)
@click.option(
    "--random-ratio",
    type=click.FloatRange(min=0, max=1),
    default=RANDOM_RATIO,
    show_default=True,
    help="Share of the method that computes random tokens again, to compare with.",
)
@click.option(
    "--check-layer",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Layer that compares new keys and values with the reused ones, counted from 0.",
)
@click.option(
    "--first-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens at the front of each chunk that are always computed again.",
)
@click.option(
    "--questions",
    type=click.IntRange(min=1),
    help="Most questions to measure, taken evenly from all questions. Default: all questions.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of timing repetitions of each question; the methods alternate.",
)
@click.option(
    "--least-agreement",
    type=click.FloatRange(min=0, max=1),
    default=0.98,
    show_default=True,
    help="Share of decisions to keep; the smallest ratio that keeps it is printed.",
)
@json_option
@click.option(
    "--markdown",
    type=click.Path(path_type=Path),
    help="File to write the table to as Markdown. Default: the table is only printed.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for plots (PNG) and their data (CSV). Default: nothing is plotted.",
)
def blend(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    max_tokens: int | None,
    data: str,
    examples: str | None,
    shots: int,
    pool: int,
    seed: int,
    chunks: int | None,
    chunk_tokens: int | None,
    separator: str,
    ratios: tuple[float, ...],
    random_ratio: float,
    check_layer: int,
    first_tokens: int,
    questions: int | None,
    rounds: int,
    least_agreement: float,
    json_file: Path | None,
    markdown: Path | None,
    output: Path | None,
) -> None:
    """Measure chunks in any order: quality and time by the share of tokens that is computed again.

    Outputs must read the last token: give --task label-logits or --pooling lasttoken. Methods are compared
    with full recomputation: the ratios, prefix caching, random tokens, and each chunk alone in front of the
    question. All keys and values are in memory before anything is timed. Questions that do not fit into the
    model are left out, and their number is printed.
    """
    plots = PaperPlots(output, "cosine") if output else None
    read = read_questions(data) if examples is None else _labelled(data, "data")
    shown = _labelled(examples, "examples") if examples else []
    chosen: list[Any] = spread(read, questions or len(read))
    engine = PrefillEngine.load(
        checkpoint, dtype=dtype, threads=threads, max_tokens=max_tokens, key_values=KeyValueOptions()
    )
    cases: Sequence[Case]
    if examples:
        cases = example_cases(engine, shown, chosen, separator=separator, shots=shots, pool=pool, seed=seed)
    else:
        cases = question_cases(engine, chosen, separator=separator, chunks=chunks, chunk_tokens=chunk_tokens)
    if len(cases) < len(chosen):
        click.echo(f"{len(chosen) - len(cases)} of {len(chosen)} questions do not fit into the model")
    with shown_progress() as progress:
        reports = compare_blending(
            engine,
            cases,
            ratios=ratios,
            random_ratio=random_ratio,
            like=Recomputation(random_ratio, check_layer=check_layer, first_tokens=first_tokens),
            rounds=rounds,
            on_case=lambda done, total: progress("measuring", done, total),
        )
    engine.close()
    facts = {
        **machine_and_model(engine),
        "questions": len(cases),
        "chunks": sum(len(case.sequence.spans) for case in cases) / len(cases),
        "tokens": sum(len(case.sequence.ids) for case in cases) / len(cases),
    }
    _show(facts, reports, markdown)
    kept = {
        "mean": smallest_ratio(reports, least_agreement),
        "confident": smallest_ratio(reports, least_agreement, confident=True),
    }
    if engine.decisions.labels:
        _show_decisions(reports[0])
        _show_smallest(least_agreement, kept)
    methods = [without_nan(asdict(report)) for report in reports]
    write_json(json_file, {"machine": facts, "methods": methods, "smallest_ratio": kept})
    if plots:
        plots.blending(reports)
        click.echo(f"{output}: blend_quality.png, blend_time.png, blend.csv")


def _labelled(source: str, field: str) -> list[Labelled]:
    """Return the labelled texts of FILE:TEXT,LABEL. Raises InvalidInput, which names `field`."""
    path, _, columns = source.rpartition(":")
    names = columns.split(",")
    if not path or len(names) != 2 or not all(names):
        raise InvalidInput(
            f"{field} must name a file and its columns of texts and labels, such as "
            "examples.tsv:sentence,label",
            field=field,
        )
    return [Labelled(*row) for row in zip(*read_labelled(path, *names), strict=True)]


def _show(facts: dict[str, Any], reports: Sequence[MethodReport], markdown: Path | None) -> None:
    columns = [
        "method",
        "cosine",
        "bound",
        "5th perc.",
        "agreement",
        "bound",
        "accuracy",
        "difference",
        "tokens",
        "ms",
        "time ratio",
    ]
    rows = [_cells(report) for report in reports]
    used = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    columns, rows = [columns[index] for index in used], [[row[index] for index in used] for row in rows]
    show_machine(facts)
    show_table(
        f"{facts['questions']} prompts of {facts['chunks']:.1f} chunks and {facts['tokens']:.0f} tokens; "
        "bounds with 95 % confidence",
        columns,
        rows,
    )
    if markdown:
        write_markdown(markdown, columns, rows)


def _cells(report: MethodReport) -> list[str]:
    ends = report.accuracy_difference
    return [
        report.method,
        _number(report.cosine),
        _number(report.cosine_bound),
        _number(report.cosine_5th_percentile),
        _number(report.agreement),
        _number(report.agreement_bound),
        _number(report.accuracy),
        f"{ends[0]:+.3f} to {ends[1]:+.3f}" if ends else "",
        f"{report.computed_tokens:.0f}",
        f"{1000 * report.seconds:.1f}",
        f"{report.time_ratio:.3f}",
    ]


def _number(value: float) -> str:
    return "" if value != value else f"{value:.4f}"


def _show_decisions(reference: MethodReport) -> None:
    """Print how often the reference decides each class, most often first; at most five classes."""
    if reference.decisions:
        often = sorted(reference.decisions.items(), key=lambda pair: -pair[1])[:5]
        click.echo("Recomputed decisions: " + ", ".join(f"{name} {share:.1%}" for name, share in often))


def _show_smallest(least: float, kept: dict[str, float | None]) -> None:
    mean, confident = kept["mean"], kept["confident"]
    if mean is None:
        click.echo(f"No measured ratio keeps {least:.1%} of the decisions.")
        return
    proven = "no ratio" if confident is None else f"ratio {confident:g}"
    click.echo(
        f"Ratio {mean:g} and every larger one keep {least:.1%} of the decisions; with 95 % confidence, "
        f"{proven} does."
    )
