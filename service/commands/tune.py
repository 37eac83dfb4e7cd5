"""`attncache tune`: measure the ways to spend a quality budget, and write the settings of the best one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from attncache_core import Checkpoint, InvalidInput, LinearClassifier, Quantization
from attncache_core.checkpoints.checkpoint import Device, Dtype
from attncache_core.corpus.reading import read_labelled, read_texts
from attncache_core.evaluation.tuning.measuring import MeasuredWay
from attncache_core.evaluation.tuning.results import Results
from attncache_core.evaluation.tuning.tune import Texts, TuneEvents, TuneOptions, TuneReport, Tuning
from attncache_core.evaluation.tuning.ways import WAYS, Way, parse_ways
from attncache_core.runtime.files import HeldByAnother, locked_at_once
from service.commands.build import budget_options
from service.commands.database import overlap
from service.commands.options import (
    Number,
    classifier_option,
    device_option,
    dtype_option,
    max_tokens_option,
    model_option,
    quantize_texts_option,
    revision_option,
    threads_option,
    use_options,
)
from service.commands.progress import shown_progress
from service.commands.report import require_writable
from service.commands.tune_report import WRITTEN_BY, comment, line_of, show_report
from service.loading.checkpoints import chosen_checkpoint
from service.plots import WAY_COLUMNS, Plots
from service.settings import Settings
from service.settings.reading import write_settings


@click.command("tune")
@model_option
@revision_option
@dtype_option
@quantize_texts_option
@threads_option
@use_options
@max_tokens_option
@device_option
@click.option(
    "--texts",
    required=True,
    multiple=True,
    metavar="FILE",
    help="Texts like those that clients will send: a .txt, .tsv, .csv or .jsonl file, FILE or "
    "FILE:column. May be repeated.",
)
@click.option(
    "--label-column",
    help="Column with the true labels of the texts, to show accuracies. Default: no accuracies.",
)
@classifier_option
@click.option(
    "--database",
    type=click.Path(path_type=Path),
    help="Folder of a database of attention maps to measure. Default: databases are built from half of the "
    "texts.",
)
@budget_options("texts", "model in float32")
@click.option(
    "--min-gain",
    type=Number(min=0),
    default=Settings.model_fields["min_gain"].default,
    show_default=True,
    help="Spend quality only on what makes batches faster by at least this share.",
)
@click.option(
    "--ways",
    help=f"Ways to measure, separated by commas: {', '.join(WAYS)}. Default: all; maps not for causal "
    "models.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    default=TuneOptions.sample,
    show_default=True,
    help="Most texts to measure on; at most half of the texts are used.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=TuneOptions.rounds,
    show_default=True,
    help="Number of timing repetitions; a way and the exact model alternate.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="attncache.toml",
    show_default=True,
    help="File of settings to write, ending in .toml. What was measured is kept beside the file, in a file "
    "ending in .json, databases in a folder ending in .databases, and a classifier in one ending in "
    ".classifier.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File ending in .png for a plot of quality against speed; its figures are written beside it, in a "
    "file ending in .csv. Default: no plot.",
)
def tune(
    texts: tuple[str, ...],
    label_column: str | None,
    classifier: Path | None,
    ways: str | None,
    output: Path,
    plot: Path | None,
    dtype: Dtype,
    threads: int | None,
    device: Device,
    max_tokens: int | None,
    **options: Any,
) -> None:
    """Measure the ways to spend a quality budget on your texts, and write the settings of the best one.

    Number formats (bfloat16, int8, int4), dropped attention, dropped layers, the reuse of attention maps, and
    combinations of them are compared with the exact model on this machine. Half of the texts rank layers and
    are recorded; the other half measures. Serve the result with `attncache serve --config FILE`. A run that
    was stopped continues when the same command is given again.
    """
    _require_writable(output)
    plots = _plots(plot) if plot else None
    model = {name: options.pop(name) for name in _OF_MODELS}
    engine: dict[str, Any] = {"dtype": dtype, "threads": threads, "device": device, "max_tokens": max_tokens}
    tuned = TuneOptions(
        checkpoint=_checkpoint(model),
        texts=_read(texts, label_column),
        classifier=LinearClassifier.load(classifier) if classifier else None,
        ways=None if ways is None else parse_ways(ways),
        results=output.with_suffix(".json"),
        databases=output.with_suffix(".databases"),
        **engine,
        **options,
    )
    with ExitStack() as stack:
        with shown_progress() as progress:
            tuning = Tuning(tuned, TuneEvents(progress, _show_texts, _show_way, _show_failure))
            stack.enter_context(_only_tuning_of(output))
            notes = list(_overlap(tuning))
            for note in notes:
                click.echo(note, err=True)
            report = tuning.run()
        # Before the settings, which name it.
        if report.classifier:
            report.classifier.save(_classifier_of(output, report.classifier))
        used = {**model, **engine, "classifier": classifier}
        write_settings(output, _settings(report, used, output), [*comment(report), *notes])
        if plots and plot:
            plots.ways(report, plot.stem)
    show_report(report)
    click.echo(f"{output}: serve these settings with `attncache serve --config {output}`")
    if plot:
        click.echo(f"{plot}, and its figures in {plot.with_suffix('.csv')}")


def _require_writable(output: Path) -> None:
    """Raise InvalidInput unless the file of the settings is missing, or of a tuning."""
    if output.suffix != ".toml":
        raise InvalidInput(f"--output {output} must end in .toml", field="output")
    require_writable(output, "--output")
    if output.exists() and not output.read_bytes().startswith(f"# {WRITTEN_BY}".encode()):
        raise InvalidInput(
            f"--output {output} exists and was not written by tune; choose another file", field="output"
        )


@contextmanager
def _only_tuning_of(output: Path) -> Iterator[None]:
    """Be the only tuning with this output while the `with` block runs. Raises InvalidInput, and OSError."""
    try:
        with locked_at_once(output.with_name(f".{output.name}.lock")):
            yield
    except HeldByAnother as held:
        raise InvalidInput(
            f"{held} tunes with --output {output} at present; wait until it has ended, or choose another "
            "name",
            field="output",
        ) from held


def _classifier_of(output: Path, classifier: LinearClassifier) -> Path:
    """Return the folder of a classifier beside the settings.

    Each classifier has a folder of its own: settings of an earlier tuning keep theirs, also if this one is
    stopped before it has written its settings.
    """
    digest = hashlib.sha256(f"{classifier.fingerprint} {classifier.digest()}".encode()).hexdigest()
    return output.with_suffix(f".{digest[:16]}.classifier")


def _plots(plot: Path) -> Plots:
    """Return what draws the plot. Raises InvalidInput without matplotlib, before anything is measured."""
    if plot.suffix != ".png":
        raise InvalidInput(f"--plot {plot} must end in .png", field="plot")
    figures = plot.with_suffix(".csv")
    for path in (plot, figures):
        require_writable(path, "--plot")
    if figures.exists() and not figures.read_bytes().startswith(",".join(WAY_COLUMNS).encode()):
        raise InvalidInput(
            f"--plot {plot} would write its figures to {figures}, which exists and was not written by tune; "
            "choose another file",
            field="plot",
        )
    return Plots(plot.parent, "quality")


def _checkpoint(model: dict[str, Any]) -> Checkpoint:
    """Return the exact checkpoint, which holds the texts to calibrate int8 with."""
    quantization = Quantization.INT8 if model["quantize_texts"] else None
    return replace(chosen_checkpoint(**model, quantize=quantization), quantization=None)


def _read(sources: Sequence[str], label_column: str | None) -> Texts:
    """Read the texts of all files, with their labels if there is a column of labels."""
    if label_column is None:
        return Texts([text for source in sources for text in read_texts(source)], None)
    texts, labels = [], []
    for source in sources:
        read = read_labelled(source, "text", label_column)
        texts += read[0]
        labels += read[1]
    return Texts(texts, labels)


def _overlap(tuning: Tuning) -> Iterator[str]:
    """Yield sentences about measuring texts that the operator's database was made from."""
    if tuning.database:
        measured = tuning.exact.engine.tokenize(tuning.measuring.texts)
        yield from overlap(tuning.database, measured, tuning.database.without(measured)[1])


def _show_texts(choosing: Texts, measuring: Texts, results: Results) -> None:
    """Say how the texts are used, and what is known from an earlier run."""
    click.echo(f"{len(measuring.texts)} texts measure, {len(choosing.texts)} choose", err=True)
    if results.changed:
        click.echo(f"measuring anew, because this changed: {', '.join(results.changed)}", err=True)
    elif results.measured:
        click.echo(f"{results.measured} ways were measured before", err=True)


def _show_way(measured: MeasuredWay, was_kept: bool) -> None:
    click.echo(f"{line_of(measured)}{' (measured before)' if was_kept else ''}", err=True)


def _show_failure(name: str, reason: str) -> None:
    click.echo(f"{name} is left out: {reason}", err=True)


def _settings(report: TuneReport, options: dict[str, Any], output: Path) -> dict[str, object]:
    """Return the settings of `serve` that run the chosen way.

    options: of the operator, by name. Paths become absolute, because `serve` may run in another folder.
    """
    way = report.chosen.way if report.chosen else Way(dtype="float32")
    values = {name: value for name, value in options.items() if value != Settings.model_fields[name].default}
    if report.classifier:
        values["classifier"] = str(_classifier_of(output, report.classifier).resolve())
    if way.dtype:
        values["dtype"] = way.dtype
    if way.quantization:
        values["quantize"] = way.quantization
    if way.quantization is not Quantization.INT8:
        values.pop("quantize_texts", None)
    for name, layers in (("drop_attention", way.drop_attention), ("drop_block", way.drop_blocks)):
        if layers:
            values[name] = ",".join(map(str, layers))
    # A server without a database would build one and spend more of the budget than was measured. With a
    # database, it would reuse maps in fewer length groups.
    values |= {"database": report.database, "min_gain": 0.0} if report.database else {"maps": False}
    for name in ("model", "template", "classifier", "database"):
        if name in values and Path(values[name]).exists():
            values[name] = str(Path(values[name]).resolve())
    if "quantize_texts" in values:
        values["quantize_texts"] = str(Path(values["quantize_texts"]).resolve())  # with :column, if given
    return values


_OF_MODELS = ("model", "revision", "quantize_texts", "template", "pooling", "task", "labels")
