"""The command line, `attncache`. An error is one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import service.ending  # noqa: F401 # isort: skip - before anything that loads torch

import importlib
from collections import UserDict
from typing import IO, Any

import click

from attncache_core import AttnCacheError
from attncache_core.version import __version__


class LazyCommands(UserDict[str, Any]):
    """Commands by name, given as "module:attribute". A module is imported when its command is used.

    `attncache serve` therefore loads neither the build nor the evaluation.
    """

    def __getitem__(self, name: str) -> click.Command:
        module, _, attribute = self.data[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


_COMMANDS = LazyCommands(
    {
        "build": "service.commands.build:build",
        "calibrate": "service.commands.calibrate:calibrate",
        "classify": "service.commands.bulk:classify",
        "embed": "service.commands.bulk:embed",
        "evaluate": "service.commands.evaluate:evaluate",
        "fit-classifier": "service.commands.fit:fit",
        "inspect": "service.commands.database:inspect",
        "prune": "service.commands.prune:prune",
        "push": "service.commands.push:push",
        "renew": "service.commands.renew:renew",
        "serve": "service.commands.serve:serve",
        "tune": "service.commands.tune:tune",
        "verify": "service.commands.database:verify",
    }
)


class _OneLine(click.ClickException):
    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"attncache: {self.format_message()}", file=file, err=True)


class OneLineErrors(click.Group):
    """A group that shows the errors of its commands, and click's own errors, in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except AttnCacheError as error:
            raise _OneLine(" ".join(str(error).split())) from error
        except OSError as error:
            raise _OneLine(f"{error.filename or 'a file'}: {error.strerror}") from error
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _OneLine(error.format_message()) from error


class _Main(OneLineErrors):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "bench":
            raise click.UsageError("benchmarks run from a checkout: python -m benchmarks NAME")
        return super().resolve_command(ctx, args)


@click.group(cls=_Main, commands=_COMMANDS)
@click.version_option(__version__, prog_name="attncache")
def main() -> None:
    """Prefill-only transformer inference that reuses attention maps."""
