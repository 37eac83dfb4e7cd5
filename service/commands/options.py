"""Options that several commands share. settings_options.py makes those of `serve`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from attncache_core import DEFAULT_MODEL, Checkpoint, PrefillEngine, Quantization
from attncache_core.checkpoints.checkpoint import Device, Dtype, PoolingMode
from attncache_core.corpus.reading import read_texts
from service.loading.checkpoints import OF_CHECKPOINTS, chosen_checkpoint
from service.settings import Settings, option_name
from service.settings.model import ChosenTask

Command = Callable[..., None]


class Number(click.FloatRange):
    """A number in a range. click lets nan pass, which is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail with the range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


def with_options(command: Callable[..., Any], *options: Callable[[Command], Command]) -> Command:
    """Return a command with options, in the order of its help."""
    for option in reversed(options):
        command = option(command)
    return command


def exclude_option(command: Command) -> Command:
    """Add --exclude. Its former name --without stays as a hidden alias for one version."""

    @functools.wraps(command)
    def with_excluded(*, exclude: tuple[str, ...], without: tuple[str, ...], **values: Any) -> None:
        command(exclude=(*exclude, *without), **values)

    excluding = click.option(
        "--exclude",
        multiple=True,
        metavar="FILE",
        help="Exclude the texts of this file, FILE or FILE:column,column. May be repeated. Default: no "
        "text is excluded.",
    )
    return with_options(with_excluded, excluding, click.option("--without", multiple=True, hidden=True))


def _of_settings(name: str, kind: Any, metavar: str | None = None) -> Callable[[Command], Command]:
    """Return an option with the default and the help of the option of `serve`."""
    field = Settings.model_fields[name]
    return click.option(
        option_name(name),
        type=kind,
        metavar=metavar,
        default=field.default,
        show_default=bool(field.default),
        help=field.description,
    )


max_tokens_option = click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    help="Cut texts to this number of tokens. Default: the longest text that the model accepts.",
)


device_option = _of_settings("device", click.Choice(get_args(Device)))
quantize_texts_option = _of_settings("quantize_texts", str)


def quantize_options(command: Command) -> Command:
    """Add --quantize and --quantize-texts."""
    quantize = click.option(
        "--quantize",
        type=click.Choice([kind.value for kind in Quantization]),
        callback=lambda _context, _option, value: value and Quantization(value),
        help="Quantise the weights of the model's layers. Default: no quantisation.",
    )
    return quantize(quantize_texts_option(command))


json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="File to write the report to as JSON. Default: the report is only printed.",
)


def model_options(command: Command) -> Command:
    """Add the options that choose a model and its use; the command gets `checkpoint`, `dtype`, `threads`."""
    return whole_model_options(drop_options(use_options(command)))


def engine_options(command: Command) -> Command:
    """Add model_options, --max-tokens and --device; the command gets `load`, which loads the engine."""

    @functools.wraps(command)
    def with_load(
        checkpoint: Checkpoint,
        dtype: Dtype,
        threads: int | None,
        device: Device,
        max_tokens: int | None,
        **values: Any,
    ) -> None:
        load = functools.partial(
            PrefillEngine.load, checkpoint, dtype=dtype, threads=threads, device=device, max_tokens=max_tokens
        )
        command(load=load, **values)

    return model_options(max_tokens_option(device_option(with_load)))


def drop_options(command: Command) -> Command:
    """Add --drop-attention and --drop-block."""
    drops = (_of_settings(name, str, "LAYERS") for name in ("drop_attention", "drop_block"))
    return with_options(command, *drops)


template_option = _of_settings("template", click.Path(path_type=Path))
classifier_option = _of_settings("classifier", click.Path(path_type=Path))
pooling_option = _of_settings("pooling", click.Choice(get_args(PoolingMode)))


def use_options(command: Command) -> Command:
    """Add --template, --pooling, --task and --labels."""
    task = _of_settings("task", click.Choice(get_args(ChosenTask)))
    return with_options(command, template_option, pooling_option, task, _of_settings("labels", str))


revision_option = _of_settings("revision", str)
model_option = click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="Model to run: a folder, the name of an installed model, or a Hugging Face Hub id.",
)


dtype_option = _of_settings("dtype", click.Choice(get_args(Dtype)))
threads_option = _of_settings("threads", click.IntRange(min=1))


def whole_model_options(command: Command) -> Command:
    """Add the options of model_options, but without drop_options and use_options.

    The command may add some of these options itself; the checkpoint is chosen by all of them.
    """

    @functools.wraps(command)
    def with_checkpoint(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in OF_CHECKPOINTS if name in values}
        command(checkpoint=chosen_checkpoint(**chosen), **values)

    return with_options(
        with_checkpoint, model_option, revision_option, dtype_option, quantize_options, threads_option
    )


def kept_indices(engine: PrefillEngine, texts: Sequence[str], excluded: Sequence[str]) -> list[int]:
    """Return the indices of the texts whose tokens differ from the tokens of all excluded texts.

    excluded: files with texts, as `read_texts` reads them. Prints how many texts they exclude.
    """
    if not excluded:
        return list(range(len(texts)))
    excluded_ids = {tuple(ids) for source in excluded for ids in engine.tokenize(read_texts(source))}
    kept = [index for index, ids in enumerate(engine.tokenize(texts)) if tuple(ids) not in excluded_ids]
    click.echo(f"{len(texts) - len(kept)} of {len(texts)} texts excluded", err=True)
    return kept
