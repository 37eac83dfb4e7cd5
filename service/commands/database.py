"""`attncache inspect` and `verify`: show a database, and prove that its files are intact."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from attncache_core import AttentionDatabase, CorruptDatabase
from service.commands.database_report import show_database


@click.command("inspect")
@click.argument("database", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print the manifest as JSON. Default: a summary for people."
)
def inspect(database: Path, as_json: bool) -> None:
    """Show the content of a database. Of a database that was renewed, the generation that serves is shown."""
    opened = AttentionDatabase.open(database)
    if as_json:
        click.echo((opened.folder / "manifest.json").read_text(encoding="utf-8"), nl=False)
    else:
        show_database(opened)


@click.command("verify")
@click.argument("database", type=click.Path(path_type=Path))
def verify(database: Path) -> None:
    """Read all files of a database and report damage. The exit code is 1 if anything is damaged.

    Of a database that was renewed, all generations are read. What a renewal that was stopped has left is no
    damage: the next renewal goes on with it, or removes it.
    """
    try:
        opened = AttentionDatabase.open(database)
        problems = opened.verify()
    except CorruptDatabase as error:
        problems = [str(error)]
    for problem in problems:
        click.echo(problem)
    if problems:
        sys.exit(1)
    click.echo(f"{opened.search.store.records} records, all sound")
