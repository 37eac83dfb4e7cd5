"""`attncache embed` and `attncache classify`: files of texts, without a server."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attncache_core import Checkpoint, LinearClassifier, PrefillEngine
from attncache_core.runtime.devices import Device, Dtype
from service.bulk.computing import Task, classes, embedding
from service.bulk.formats import CLASS_FORMATS, EMBEDDING_FORMATS, check_output
from service.bulk.rows import INPUT_FORMATS
from service.bulk.run import Files, Stopped, run
from service.commands.options import (
    Command,
    device_option,
    drop_options,
    max_tokens_option,
    model_options,
    pooling_option,
    template_option,
    whole_model_options,
)
from service.commands.progress import shown_share
from service.settings import Settings

_INTERRUPTED = 130  # the exit code of a program that Ctrl+C ended


def _file_options(formats: tuple[str, ...]) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of files, batches and the device; the command gets Files.

    formats: of the output.
    """

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def with_files(
            source: Path, output: Path, column: str, file_format: str | None, **values: Any
        ) -> None:
            check_output(output, formats)
            command(files=Files(source, column, file_format, output), **values)

        described: Command = with_files
        for option in (
            device_option,
            max_tokens_option,
            click.option(
                "--batch-tokens",
                type=click.IntRange(min=1),
                default=Settings.model_fields["max_batch_tokens"].default,
                show_default=True,
                help="Most tokens in one batch. A longer text is a batch of its own.",
            ),
            click.option(
                "--format",
                "file_format",
                type=click.Choice(INPUT_FORMATS),
                help="Format of the input. Default: the ending of the file's name.",
            ),
            click.option("--column", default="text", show_default=True, help="Column with the texts."),
            click.option(
                "--output",
                type=click.Path(path_type=Path, dir_okay=False),
                required=True,
                help=f"File to write, ending in {' or '.join(f'.{name}' for name in formats)}.",
            ),
            click.option(
                "--input",
                "source",
                type=click.Path(path_type=Path),
                required=True,
                help="Texts: a .txt (one per line), .tsv, .csv, .jsonl or .parquet file.",
            ),
        ):
            described = option(described)
        return described

    return add


@click.command("embed")
@whole_model_options
@drop_options
@pooling_option
@template_option
@_file_options(EMBEDDING_FORMATS)
@click.option("--prompt-name", help="One of the model's own prompts. Default: the model's default prompt.")
@click.option(
    "--dimensions",
    type=click.IntRange(min=1),
    help="Keep only the first numbers of each embedding. Default: all.",
)
def embed(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    device: Device,
    max_tokens: int | None,
    files: Files,
    batch_tokens: int,
    prompt_name: str | None,
    dimensions: int | None,
) -> None:
    """Embed the texts of a file of any size. Row i of the output belongs to text i of the input.

    A run that was stopped or killed continues when the same command is given again. Nothing is reused, so the
    embeddings are exact. Texts that are too long are cut.
    """
    engine = PrefillEngine.load(
        checkpoint, dtype=dtype, threads=threads, device=device, max_tokens=max_tokens
    )
    task = embedding(engine, prompt_name, dimensions)
    options = {"--prompt-name": prompt_name, "--dimensions": dimensions}
    rows = _run(engine, task, files, batch_tokens, "embedding texts", options)
    click.echo(f"{files.output}: {rows:,} embeddings of {task.width} dimensions")


@click.command("classify")
@model_options
@_file_options(CLASS_FORMATS)
@click.option(
    "--classifier",
    type=click.Path(path_type=Path),
    help=Settings.model_fields["classifier"].description,
)
def classify(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    device: Device,
    max_tokens: int | None,
    files: Files,
    batch_tokens: int,
    classifier: Path | None,
) -> None:
    """Classify the texts of a file of any size: the best label, its score, and the scores of all labels.

    The labels are those of the model, of --classifier or of --labels. Row i of the output belongs to text i
    of the input. A run that was stopped or killed continues when the same command is given again. Nothing is
    reused, so the scores are exact. Texts that are too long are cut.
    """
    engine = PrefillEngine.load(
        checkpoint,
        dtype=dtype,
        threads=threads,
        device=device,
        max_tokens=max_tokens,
        classifier=LinearClassifier.load(classifier) if classifier else None,
    )
    task = classes(engine)
    rows = _run(engine, task, files, batch_tokens, "classifying texts", {})
    click.echo(f"{files.output}: {rows:,} texts, {task.width} labels")


def _run(
    engine: PrefillEngine, task: Task, files: Files, batch_tokens: int, stage: str, options: dict[str, Any]
) -> int:
    """Run the task, and return the number of rows. Ctrl+C ends the process in one line."""
    try:
        with shown_share(stage) as report:
            return run(engine, task, files, batch_tokens, {"command": stage, **options}, report)
    except Stopped as stopped:
        click.echo(f"attncache: {stopped}", err=True)
        sys.exit(_INTERRUPTED)
