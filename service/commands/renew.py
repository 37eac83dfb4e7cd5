"""`attncache renew`: build the next generation of a database, and let it serve if it is better."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attncache_core import InvalidInput, PrefillEngine
from attncache_core.build.renewal import renew_database
from attncache_core.corpus.reading import read_texts
from attncache_core.reuse.maps.generations import Result
from attncache_core.reuse.maps.publishing import roll_back
from service.commands.options import Command, Number, engine_options
from service.commands.progress import shown_progress
from service.settings import Settings

# The exit code if the generation that served before serves on, although nothing failed.
_NOTHING_RENEWED = 3


def _or_rolled_back(command: Command) -> Command:
    """Add --rollback, which needs no model."""

    @functools.wraps(command)
    def renewed_or_rolled_back(
        *, database: Path, corpora: tuple[str, ...], rollback: bool, **values: Any
    ) -> None:
        if not rollback:
            command(database=database, corpora=corpora, **values)
            return
        if corpora:
            raise InvalidInput("give --corpus or --rollback, and not both", field="rollback")
        click.echo(roll_back(database).told())

    described: Command = click.option(
        "--rollback", is_flag=True, help="Let the generation before serve again, and build nothing."
    )(renewed_or_rolled_back)
    return described


@click.command("renew")
@_or_rolled_back
@click.argument("database", type=click.Path(path_type=Path))
@engine_options
@click.option(
    "--corpus",
    "corpora",
    multiple=True,
    metavar="FILE",
    help="Texts like those that clients send, oldest first: a .txt, .tsv, .csv or .jsonl file, FILE or "
    "FILE:column,column. May be repeated. Without this option, the texts are the sample that "
    "`attncache serve --sample` keeps in DATABASE/sample.",
)
@click.option(
    "--min-gain",
    type=Number(min=0),
    default=Settings.model_fields["min_gain"].default,
    show_default=True,
    help="Least gain in speed of a length group that reuses maps, as for `serve`. With 0, no gain is "
    "measured, and all length groups reuse maps.",
)
@click.option(
    "--synthetic-only",
    is_flag=True,
    help="Leave out the records of single texts, as `build` does with this option. A database that was built "
    "with this option is always renewed with it.",
)
def renew(
    database: Path,
    load: Callable[..., PrefillEngine],
    corpora: tuple[str, ...],
    min_gain: float,
    synthetic_only: bool,
) -> None:
    """Renew the database in a folder from newer texts, while servers use it.

    The next generation is built beside the present one, with the options of its build and the budget of its
    calibration. The newest tenth of the texts is held out. The next generation is published if its hits keep
    the budget on these texts, and save at least 1 % more time than the present one, as servers have tightened
    it, also on the texts of each API key of a sample. Running servers change to it within a second. Otherwise
    it is removed. DATABASE/renewals.jsonl says what was measured and decided. A renewal that was stopped goes
    on if the same command is given again.

    The exit code is 0 if a generation was published or rolled back, 3 if the present one serves on because
    the next one is not better or reuse does not pay on this machine, and 2 after an error.
    """
    texts = [text for source in corpora for text in read_texts(source)] if corpora else None
    with shown_progress() as progress:
        renewal = renew_database(
            lambda opened: load(database=opened),
            database,
            texts,
            min_gain=min_gain,
            synthetic_only=synthetic_only,
            progress=progress,
        )
    click.echo(renewal.told())
    if renewal.result is not Result.PUBLISHED:
        sys.exit(_NOTHING_RENEWED)
