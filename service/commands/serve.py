"""`attncache serve`: its options. What it does with them is in serving.py, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from service.commands.settings_options import SettingsCommand, given_options
from service.observability.logs import configure_logging
from service.settings import gather_settings


@click.command("serve", cls=SettingsCommand)
@click.pass_context
def serve(context: click.Context, /, config: Path | None, **_: Any) -> None:
    """Serve embeddings and classes over HTTP.

    Every option is also an environment variable, and a key of the file of --config. The exit code is 0 after
    SIGTERM, and 2 if an option, the model or the database is refused.
    """
    settings = gather_settings(given_options(context), config)
    configure_logging(settings.log_level, settings.log_format)
    # Help and mistakes in options come before it.
    from service.commands.serving import run_server

    run_server(settings)
