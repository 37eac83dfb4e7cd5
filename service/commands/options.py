"""Options of commands: those of `serve` are the fields of Settings, click only shows them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from attncache_core import DEFAULT_MODEL, Checkpoint, Quantization, find_variant
from attncache_core.checkpoint import PoolingMode
from attncache_core.devices import Device, Dtype
from attncache_core.prompts import Template
from service.settings import ChosenTask, Settings, environment_name, option_name

_METAVARS = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def settings_options() -> list[click.Parameter]:
    """An option for each field of Settings, with its variable, help and default."""
    return [_option(name, field) for name, field in Settings.model_fields.items()]


def _of_settings(name: str, kind: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option that says the same as that of `serve`."""
    return click.option(option_name(name), type=kind, help=Settings.model_fields[name].description)


max_tokens_option = click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    help="Cut texts to so many tokens; default: as the model does.",
)


device_option = click.option(
    "--device",
    type=click.Choice(get_args(Device)),
    default="cpu",
    show_default=True,
    help=Settings.model_fields["device"].description,
)


quantize_option = click.option(
    "--quantize",
    type=click.Choice([kind.value for kind in Quantization]),
    callback=lambda _context, _option, value: value and Quantization(value),
    help="Round the weights of the model's layers; default: leave them.",
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that runs a model; it is given a `checkpoint`, a `dtype` and `threads`."""
    return whole_model_options(drop_options(use_options(command)))


def drop_options(command: Callable[..., None]) -> Callable[..., None]:
    """--drop-attention and --drop-block."""
    for name in ("drop_block", "drop_attention"):
        field = Settings.model_fields[name]
        command = click.option(option_name(name), default="", metavar="LAYERS", help=field.description)(
            command
        )
    return command


template_option = _of_settings("template", click.Path(path_type=Path))


def use_options(command: Callable[..., None]) -> Callable[..., None]:
    """--template, --pooling, --task and --labels."""
    for option in (
        _of_settings("labels", str),
        _of_settings("task", click.Choice(get_args(ChosenTask))),
        _of_settings("pooling", click.Choice(get_args(PoolingMode))),
        template_option,
    ):
        command = option(command)
    return command


revision_option = _of_settings("revision", str)


def whole_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """As model_options, for a command that has no use for some of them: those are not taken."""

    @functools.wraps(command)
    def with_checkpoint(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in _OF_CHECKPOINTS if name in values}
        command(checkpoint=chosen_checkpoint(**chosen), **values)

    described: Callable[..., None] = with_checkpoint
    for option in (
        click.option("--threads", type=click.IntRange(min=1), help="Threads; default: all that may be used."),
        quantize_option,
        click.option("--dtype", type=click.Choice(get_args(Dtype)), default="auto", show_default=True),
        revision_option,
        click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Folder, package or Hub id."),
    ):
        described = option(described)
    return described


def chosen_checkpoint(
    *,
    model: str,
    revision: str | None,
    quantize: Quantization | None,
    drop_attention: str = "",
    drop_block: str = "",
    template: Path | None = None,
    pooling: PoolingMode | None = None,
    task: ChosenTask | None = None,
    labels: str | None = None,
) -> Checkpoint:
    """The checkpoint that these options choose, used as they say."""
    found = find_variant(
        model, revision, quantization=quantize, drop_attention=drop_attention, drop_block=drop_block
    )
    return found.adapted(
        template=Template.read(template) if template else None,
        pooling=pooling,
        label_logits=task is not None,
        labels=[name.strip() for name in labels.split(",")] if labels else (),
    )


def checkpoint_of(settings: Settings) -> Checkpoint:
    """The checkpoint that a server's settings choose."""
    return chosen_checkpoint(**{name: getattr(settings, name) for name in _OF_CHECKPOINTS})


_OF_CHECKPOINTS = tuple(inspect.signature(chosen_checkpoint).parameters)


def _option(name: str, field: FieldInfo) -> click.Option:
    option = option_name(name)
    common: dict[str, Any] = {
        "envvar": environment_name(name),
        "show_envvar": True,
        # click would show the name of an enum's member.
        "default": field.default.value if isinstance(field.default, StrEnum) else field.default,
        "show_default": field.default not in (None, ""),
        "help": field.description,
    }
    if field.annotation is bool:
        return click.Option([f"{option}/--no-{option[2:]}", name], **common)
    # Unprocessed: the value is checked in one place, by Settings.
    return click.Option([option, name], type=click.UNPROCESSED, metavar=_metavar(field.annotation), **common)


def _metavar(annotation: Any) -> str:
    """int | None -> INTEGER; Literal["a", "b"] -> a|b."""
    kinds = (annotation,) if get_origin(annotation) is Literal else get_args(annotation) or (annotation,)
    if get_origin(kinds[0]) is Literal:
        return "|".join(get_args(kinds[0]))
    if issubclass(kinds[0], StrEnum):
        return "|".join(kinds[0])
    return _METAVARS[kinds[0]]
