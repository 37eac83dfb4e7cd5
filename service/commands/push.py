"""`attncache push`: send a database to an object store, from which servers download it."""

from __future__ import annotations

from pathlib import Path

import click

from service.commands.progress import shown_progress
from service.loading.pushing import push as push_database


@click.command("push")
@click.argument("database", type=click.Path(path_type=Path))
@click.argument("url")
def push(database: Path, url: str) -> None:
    """Send a database to an object store, for servers with --database URL.

    Of a database that was renewed, the generation that serves is sent. Files that are there are not sent
    again, so a push that was stopped goes on if the same command is given again. If URL holds the database
    already, its objects are read, and damaged ones are sent again. Servers look for another database every 30
    seconds. If two commands push at once, the slower one fails.

    URL: s3://BUCKET/NAME, gs://BUCKET/NAME, az://CONTAINER/NAME or file:///FOLDER. Needs the extra [cluster].
    """
    with shown_progress() as progress:
        told = push_database(database, url, progress)
    click.echo(told)
