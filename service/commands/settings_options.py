"""The options of `serve`, made from the fields of Settings, and its help, which lists them by group."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from service.settings import (
    CONFIG_VARIABLE,
    GROUPS,
    REMOVED_FIELDS,
    environment_name,
    option_name,
)

_METAVARS = {str: "TEXT", SecretStr: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


class SettingsCommand(click.Command):
    """A command with an option for each field of Settings, and `--config`."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.params = [*settings_options(), *_removed_settings_options(), config_option(), *self.params]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one section per group of settings."""
        records = {option.name: option.get_help_record(ctx) for option in self.get_params(ctx)}
        for group in GROUPS:
            described = [records.pop(name) for name in group.model_fields]
            with formatter.section(group.title):
                formatter.write_dl([record for record in described if record])
        with formatter.section("Other options"):
            formatter.write_dl([record for record in records.values() if record])


def given_options(context: click.Context) -> dict[str, Any]:
    """Return the values of the options that were given on the command line, by field name."""
    names = [name for group in GROUPS for name in group.model_fields]
    return {
        name: context.params[name]
        for name in names
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def settings_options() -> list[click.Parameter]:
    """Return an option for each field of Settings, with its variable, help and default."""
    return [_option(name, field) for group in GROUPS for name, field in group.model_fields.items()]


def config_option() -> click.Option:
    """Return `--config`."""
    return click.Option(
        ["--config"],
        type=click.Path(path_type=Path),
        envvar=CONFIG_VARIABLE,
        show_envvar=True,
        metavar="FILE",
        help="TOML file with settings, such as: max_batch_tokens = 512. Options and variables come first. "
        "Default: no file is read.",
    )


class _Option(click.Option):
    """An option whose variable is shown in the help but read by gather_settings."""

    def resolve_envvar_value(self, ctx: click.Context) -> None:  # noqa: ARG002
        return None


def removed_option(name: str, remedy: str) -> click.Option:
    """Return a hidden option that refuses every use in one line. remedy: what to use instead."""

    def refuse(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{name} was removed; {remedy}")

    # With a value or, as the flags among them, without one.
    return click.Option(
        [name], hidden=True, expose_value=False, callback=refuse, is_flag=False, flag_value=""
    )


def _removed_settings_options() -> list[click.Parameter]:
    """Return the former options of `serve`, which are refused."""
    return [removed_option(option_name(field), remedy) for field, remedy in REMOVED_FIELDS.items()]


def _option(name: str, field: FieldInfo) -> _Option:
    option = option_name(name)
    common: dict[str, Any] = {
        "envvar": environment_name(name),
        "show_envvar": True,
        # The value, because click would show the name of the enum's member.
        "default": field.default.value if isinstance(field.default, StrEnum) else field.default,
        # A line break, as it is written.
        "show_default": r"\n" if field.default == "\n" else field.default not in (None, ""),
        "help": field.description,
    }
    if field.annotation is bool:
        return _Option([f"{option}/--no-{option[2:]}", name], **common)
    # Unprocessed, because Settings checks all values in one place.
    return _Option([option, name], type=click.UNPROCESSED, metavar=_metavar(field.annotation), **common)


def _metavar(annotation: Any) -> str:
    """Return the placeholder for a type: int | None -> INTEGER; Literal["a", "b"] -> a|b."""
    kinds = (annotation,) if get_origin(annotation) is Literal else get_args(annotation) or (annotation,)
    if get_origin(kinds[0]) is Literal:
        return "|".join(get_args(kinds[0]))
    if issubclass(kinds[0], StrEnum):
        return "|".join(kinds[0])
    return _METAVARS[kinds[0]]
