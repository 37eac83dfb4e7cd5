"""The command line, `attncache`. An error is one line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

from typing import IO, Any

import click

from attncache_core import AttnCacheError
from service import __version__
from service.commands.bench import bench
from service.commands.build import build, inspect, verify
from service.commands.calibrate import calibrate
from service.commands.evaluate import evaluate
from service.commands.fit import fit
from service.commands.prune import prune
from service.commands.serve import serve


class _OneLine(click.ClickException):
    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"attncache: {self.format_message()}", file=file, err=True)


class _OneLineErrors(click.Group):
    """A group whose commands' errors, ours and click's, are told in one line."""

    def invoke(self, ctx: click.Context) -> Any:
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


@click.group(cls=_OneLineErrors)
@click.version_option(__version__, prog_name="attncache")
def main() -> None:
    """Prefill-only transformer inference that reuses attention maps."""


for command in (serve, build, calibrate, inspect, verify, fit, prune, evaluate, bench):
    main.add_command(command)
