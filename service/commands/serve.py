"""`attncache serve`: from options to a server that answers."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import Any

import click

from attncache_core import (
    AttentionDatabase,
    AttnCacheError,
    Checkpoint,
    LinearClassifier,
    PrefillEngine,
    build_default_database,
    find_variant,
)
from service.commands.options import adapted, settings_options
from service.commands.progress import shown_progress
from service.server import bind, run_server
from service.settings import Settings, read_settings, refuse_unknown_variables


@click.command("serve", params=settings_options())
def serve(**values: Any) -> None:
    """Serve embeddings and classes over HTTP.

    Every option is also an environment variable. Ends with code 0 on SIGTERM, 2 when an option, the model
    or the database is refused.
    """
    refuse_unknown_variables(os.environ)
    settings = read_settings(values)
    configure_logging(settings.log_level)
    # Before anything listens: a model that is not there is told at once.
    found = find_variant(
        settings.model,
        quantization=settings.quantize,
        drop_attention=settings.drop_attention,
        drop_block=settings.drop_block,
    )
    checkpoint = adapted(found, settings.template, settings.pooling, settings.task, settings.labels)
    listener = bind(settings.host, settings.port)
    failure = run_server(settings, partial(load_engine, settings, checkpoint), listener)
    if isinstance(failure, AttnCacheError):
        raise failure
    if failure is not None:
        sys.exit(1)  # its traceback has been logged


def load_engine(settings: Settings, checkpoint: Checkpoint) -> PrefillEngine:
    """The engine that these settings describe; builds the default database on the first start."""
    engine = PrefillEngine.load(
        checkpoint,
        database=_open_database(settings, checkpoint) if settings.reuse else None,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        classifier=LinearClassifier.load(settings.classifier) if settings.classifier else None,
        fetch=settings.fetch,
        max_tokens=settings.max_tokens,
    )
    if settings.search_always:
        engine.search_always()
    else:
        engine.weigh_costs()
    return engine


def _open_database(settings: Settings, checkpoint: Checkpoint) -> AttentionDatabase:
    folder = settings.database
    if folder is None:
        with shown_progress() as progress:
            folder = build_default_database(
                checkpoint,
                cache_dir=settings.cache_dir,
                dtype=settings.dtype,
                device=settings.device,
                threads=settings.threads,
                progress=progress,
            )
    threshold = settings.policy.threshold if settings.policy else settings.threshold
    return AttentionDatabase.open(folder, threshold=threshold, heads=settings.heads)


def configure_logging(level: str) -> None:
    """Log to stderr, a line each, from this level on."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # It tells of every start and stop step by step, and so do we.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
