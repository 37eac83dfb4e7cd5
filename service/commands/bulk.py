"""`attncache embed` and `attncache classify`: files of texts, without a server.

--input is one file, and its output one file. Inputs without an option are Parquet files in shards, and their
output is a folder.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from attncache_core import Checkpoint, InvalidInput, LinearClassifier, PrefillEngine
from attncache_core.checkpoints.checkpoint import Device, Dtype
from service.bulk.cluster import ray_workers
from service.bulk.computing import Task, classes, embedding
from service.bulk.formats import CLASS_FORMATS, EMBEDDING_FORMATS, check_output
from service.bulk.rows import INPUT_FORMATS
from service.bulk.run import Files, check_apart, run
from service.bulk.sharded import MANIFEST, Part, Workers, run_shards
from service.bulk.shards import ShardWorker, Work, check_input, plan
from service.commands.options import (
    Command,
    classifier_option,
    device_option,
    drop_options,
    max_tokens_option,
    model_options,
    pooling_option,
    template_option,
    whole_model_options,
    with_options,
)
from service.commands.progress import shown_shards, shown_share
from service.objects import has_secrets, is_url, without_secrets
from service.settings import Settings

_SOME_FAILED = 3
# Takes the number of threads.
_Load = Callable[[int | None], tuple[PrefillEngine, Task]]


def _file_options(formats: tuple[str, ...]) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of files, batches and the device; the command gets Files.

    formats: of the output.
    """

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def with_files(
            inputs: tuple[str, ...],
            source: Path | None,
            output: str,
            column: str,
            file_format: str | None,
            shard: Part | None,
            ray: str | None,
            **values: Any,
        ) -> None:
            if bool(inputs) == bool(source):
                raise InvalidInput("give --input FILE, or INPUTS, and not both", field="input")
            if source is None:
                if file_format not in (None, "parquet"):
                    raise InvalidInput("format: INPUTS are Parquet files", field="format")
                secret = next(filter(has_secrets, (*inputs, output)), None) if ray else None
                if secret is not None:
                    raise InvalidInput(
                        f"--ray: {without_secrets(secret)} is given with a user or a query, which Ray would "
                        "pass on; leave them out, and give each node credentials of its own, such as "
                        "AWS_ACCESS_KEY_ID",
                        field="ray",
                    )
                command(files=Shards(inputs, column, output, shard or Part(), ray), **values)
                return
            if shard or ray:
                raise InvalidInput("--shard and --ray are for INPUTS without --input", field="shard")
            files = Files(source, column, file_format, Path(output))
            check_apart(files)
            check_output(files.output, formats)
            command(files=files, **values)

        return with_options(
            with_files,
            # Eager, because a text file without --input is named before a missing --output.
            click.argument("inputs", nargs=-1, callback=_checked, is_eager=True),
            click.option(
                "--input",
                "source",
                type=click.Path(path_type=Path),
                help="Texts: a .txt (one per line), .tsv, .csv, .jsonl or .parquet file, or - for standard "
                "input.",
            ),
            click.option(
                "--output",
                required=True,
                help=f"File to write, ending in {' or '.join(f'.{name}' for name in formats)}; of INPUTS, a "
                "folder or its URL.",
            ),
            click.option("--column", default="text", show_default=True, help="Column with the texts."),
            click.option(
                "--format",
                "file_format",
                type=click.Choice(INPUT_FORMATS),
                help="Format of the input. Default: the ending of the file's name.",
            ),
            click.option(
                "--batch-tokens",
                type=click.IntRange(min=1),
                default=Settings.model_fields["max_batch_tokens"].default,
                show_default=True,
                help="Most tokens in one batch. A longer text is a batch of its own.",
            ),
            max_tokens_option,
            device_option,
            click.option(
                "--shard",
                metavar="NUMBER/COUNT",
                callback=lambda _context, _option, value: value and _part(value),
                help="Compute only this part of the shards of INPUTS, such as 3/100. Default: all.",
            ),
            click.option(
                "--ray",
                metavar="ADDRESS",
                help="Compute the shards of INPUTS on a Ray cluster: its address, auto for the one of this "
                "machine, or local to start one. Default: in this process.",
            ),
        )

    return add


@dataclass(frozen=True, slots=True)
class Shards:
    """Inputs in shards, and where their outputs go."""

    inputs: tuple[str, ...]
    column: str
    output: str
    part: Part
    ray: str | None


def _checked(_context: click.Context, _argument: click.Parameter, inputs: tuple[str, ...]) -> tuple[str, ...]:
    for given in inputs:
        check_input(given)
    return inputs


def _part(value: str) -> Part:
    number, _, count = value.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InvalidInput(f"shard: {value} must be a number and a count, such as 3/100", field="shard")
    return Part(int(number), int(count))


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
    files: Files | Shards,
    batch_tokens: int,
    prompt_name: str | None,
    dimensions: int | None,
) -> None:
    """Embed the texts of a file of any size. Row i of the output belongs to text i of the input.

    A run that was stopped or killed continues when the same command is given again. Equal texts are computed
    once. All embeddings are exact. Texts that are too long are cut.

    INPUTS are Parquet files, or folders of them, as paths or URLs; a name may hold *. They are computed in
    shards of at most 100,000 rows, with a file in the folder of --output for each. The exit code is 3 if a
    shard failed.
    """
    task = partial(embedding, prompt_name=prompt_name, dimensions=dimensions)
    load = partial(_loaded, checkpoint, dtype, device, max_tokens, None, task)
    options = {"--prompt-name": prompt_name, "--dimensions": dimensions}
    _run(load, threads, files, batch_tokens, "embedding texts", options, "{:,} embeddings of {} dimensions")


@click.command("classify")
@model_options
@_file_options(CLASS_FORMATS)
@classifier_option
def classify(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    device: Device,
    max_tokens: int | None,
    files: Files | Shards,
    batch_tokens: int,
    classifier: Path | None,
) -> None:
    """Classify the texts of a file of any size: the best label, its score, and the scores of all labels.

    The labels are those of the model, of --classifier or of --labels. Row i of the output belongs to text i
    of the input. A run that was stopped or killed continues when the same command is given again. Equal texts
    are computed once. All scores are exact. Texts that are too long are cut.

    INPUTS are Parquet files, or folders of them, as paths or URLs; a name may hold *. They are computed in
    shards of at most 100,000 rows, with a file in the folder of --output for each. The exit code is 3 if a
    shard failed.
    """
    folder = classifier and classifier.absolute()
    load = partial(_loaded, checkpoint, dtype, device, max_tokens, folder, classes)
    _run(load, threads, files, batch_tokens, "classifying texts", {}, "{:,} texts, {} labels")


def _loaded(
    checkpoint: Checkpoint,
    dtype: Dtype,
    device: Device,
    max_tokens: int | None,
    classifier: Path | None,
    task: Callable[[PrefillEngine], Task],
    threads: int | None,
) -> tuple[PrefillEngine, Task]:
    engine = PrefillEngine.load(
        checkpoint,
        dtype=dtype,
        threads=threads,
        device=device,
        max_tokens=max_tokens,
        classifier=LinearClassifier.load(classifier) if classifier else None,
    )
    return engine, task(engine)


def _run(
    load: _Load,
    threads: int | None,
    files: Files | Shards,
    batch_tokens: int,
    stage: str,
    options: dict[str, Any],
    done: str,
) -> None:
    """Compute texts. done: says how many rows there are, and their width."""
    if isinstance(files, Shards):
        _run_shards(load, threads, files, batch_tokens, stage, options)
        return
    engine, task = load(threads)
    with shown_share(stage) as report:
        written = run(engine, task, files, batch_tokens, {"command": stage, **options}, report)
    click.echo(f"{files.output}: {done.format(written.rows, task.width)}")
    if written.truncated:
        click.echo(
            f"attncache: {written.truncated:,} texts of this run were cut, because they have more than "
            f"{engine.tokenizer.max_tokens:,} tokens",
            err=True,
        )


def _run_shards(
    load: _Load,
    threads: int | None,
    files: Shards,
    batch_tokens: int,
    stage: str,
    options: dict[str, Any],
) -> None:
    """Compute shards in this process or on a Ray cluster. Ends the process if any failed."""
    output = files.output if is_url(files.output) else Path(files.output).resolve().as_uri()
    work = Work(load, files.column, batch_tokens, output, {"command": stage, **options})
    # Before the workers, which make the folder of the output.
    planned = plan(files.inputs, files.column, output)
    with ExitStack() as stack:
        workers: Workers = (
            stack.enter_context(ray_workers(files.ray, work, threads))
            if files.ray
            else ShardWorker(work, threads)
        )
        report = shown_shards(stage)
        counts = run_shards(workers, planned, output, files.part, report)
    shown = without_secrets(output)
    end = "manifest.json is written" if counts.is_complete else "not complete yet"
    click.echo(
        f"{shown}: {counts.computed:,} shards computed ({counts.rows:,} rows), "
        f"{counts.done_before:,} were there, {counts.failed:,} failed; {end}"
    )
    if counts.others:
        click.echo(
            f"attncache: {shown} also has {counts.others:,} shards of inputs that were changed or left out "
            f"since; {MANIFEST} names the shards of these inputs",
            err=True,
        )
    if counts.failed:
        click.echo(f"attncache: {shown}/{files.part.failed_name} says what failed", err=True)
        sys.exit(_SOME_FAILED)
