"""The command line, `attncache`. An error is one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import service.ending  # noqa: F401 # isort: skip - before anything that loads torch

import gc
import importlib
from collections import UserDict
from collections.abc import Mapping
from typing import IO, Any

import click

from attncache_core.errors import AttnCacheError
from attncache_core.version import __version__


class LazyCommands(UserDict[str, Any]):
    """Commands by name, given as "module:attribute". A module is imported when its command is used.

    `attncache serve` therefore loads neither the build nor the evaluation.
    """

    def __getitem__(self, name: str) -> click.Command:
        module, _, attribute = self.data[name].partition(":")
        # What modules make stays until the end, so the collector would look at it again and again in vain.
        gc.disable()
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        finally:
            gc.freeze()
            gc.enable()
        return command


# For each command its line in `attncache --help`, which imports none of them, and where it is.
_COMMANDS = {
    "build": ("Build a database of attention maps from a corpus.", "build:build"),
    "calibrate": ("Choose what may be reused within a quality budget.", "calibrate:calibrate"),
    "classify": ("Classify the texts of files of any size.", "bulk:classify"),
    "embed": ("Embed the texts of files of any size.", "bulk:embed"),
    "evaluate": ("Measure what reuse costs in quality and saves in time.", "evaluate:evaluate"),
    "fit-classifier": ("Fit a linear classifier on embeddings.", "fit:fit"),
    "inspect": ("Show the content of a database.", "database:inspect"),
    "push": ("Send a database to an object store.", "push:push"),
    "renew": ("Renew a database from newer texts while servers use it.", "renew:renew"),
    "serve": ("Serve embeddings and classes over HTTP.", "serve:serve"),
    "tune": ("Find the best way to spend a quality budget on your texts.", "tune:tune"),
    "verify": ("Read all files of a database and report damage.", "database:verify"),
}


# What is said after Ctrl+C, for commands that keep what they have done.
_TO_CONTINUE = {
    **dict.fromkeys(
        ("build", "classify", "embed", "push", "renew", "tune"), "; run the same command again to continue"
    ),
    "calibrate": "; with --segments, run the same command again to continue",
}


class _OneLine(click.ClickException):
    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"attncache: {self.format_message()}", file=file, err=True)


class _Stopped(_OneLine):
    exit_code = 130  # of a program that Ctrl+C ended


class OneLineErrors(click.Group):
    """A group that shows the errors of its commands, click's own errors and Ctrl+C in one line."""

    to_continue: Mapping[str, str] = {}

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except AttnCacheError as error:
            raise _OneLine(" ".join(str(error).split())) from error
        except OSError as error:
            raise _OneLine(f"{error.filename or 'a file'}: {error.strerror or error}") from error
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _OneLine(error.format_message()) from error
        except KeyboardInterrupt as stop:
            how = self.to_continue.get(ctx.invoked_subcommand or "", "")
            raise _Stopped(str(stop) or f"stopped{how}") from stop


class _Main(OneLineErrors):
    to_continue = _TO_CONTINUE

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (line, _) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (name := {"bench": "NAME", "prune": "importance"}.get(args[0])) is not None:
            raise click.UsageError(f"benchmarks run from a checkout: python -m benchmarks {name}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Main,
    commands=LazyCommands({name: f"service.commands.{place}" for name, (_, place) in _COMMANDS.items()}),
)
@click.version_option(__version__, prog_name="attncache")
def main() -> None:
    """Prefill-only transformer inference that reuses attention maps."""


if __name__ == "__main__":
    main()
