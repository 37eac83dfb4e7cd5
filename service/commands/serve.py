"""`attncache serve`: from options to a server that answers."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from attncache_core import (
    AttentionDatabase,
    AttnCacheError,
    Checkpoint,
    CorruptDatabase,
    LinearClassifier,
    PrefillEngine,
    build_default_database,
    open_default_database,
    set_damaged_aside,
)
from service.commands.build import why_exact
from service.commands.options import checkpoint_of, settings_options
from service.commands.progress import shown_progress
from service.rebuild import build_beside_serving
from service.server import bind, run_server
from service.settings import Settings, read_settings, refuse_unknown_variables

logger = logging.getLogger(__name__)


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
    checkpoint = checkpoint_of(settings)
    listener = bind(settings.host, settings.port)
    failure = run_server(settings, partial(load_engines, settings, checkpoint), listener)
    if isinstance(failure, AttnCacheError):
        raise failure
    if failure is not None:
        sys.exit(1)  # its traceback has been logged


def load_engines(settings: Settings, checkpoint: Checkpoint) -> Iterator[PrefillEngine]:
    """The engine that these settings describe, or two if the default database is damaged.

    The first one then reuses nothing, and serves while the database is set aside and a new one is built. The
    second one has the new database; without one there is no second engine. Raises as load_engine does for
    all else, a damaged `--database` included.
    """
    try:
        engine = load_engine(settings, checkpoint)
    except CorruptDatabase as error:
        if settings.database is not None:
            raise
        logger.warning("%s; every text is computed in full until there is a new one", error)
        engine = load_engine(settings.model_copy(update={"reuse": False}), checkpoint)
        engine.reuse_off.append("the default database is damaged, and a new one is being built")
    yield engine
    if settings.reuse and engine.database is None:
        try:
            rebuilt = _with_new_database(settings, checkpoint)
        except Exception as error:
            expected = isinstance(error, AttnCacheError | OSError)
            logger.warning("there is no new default database: %s", error, exc_info=not expected)
            engine.reuse_off[:] = ["the default database is damaged, and no new one could be built"]
        else:
            logger.info("the new default database is there: attention maps are reused from now on")
            yield rebuilt


def _with_new_database(settings: Settings, checkpoint: Checkpoint) -> PrefillEngine:
    """Set the damaged default database aside and build a new one; the engine that has it.

    Raises OSError if it cannot be set aside, and BuildFailed.
    """
    aside = set_damaged_aside(checkpoint, settings.cache_dir)
    if aside is not None:
        logger.warning("the damaged database was set aside as %s; remove it if you do not need it", aside)
    build_beside_serving(settings)
    # Beside requests, times are noise: what is measured now holds for this process only.
    return load_engine(settings, checkpoint, keep_gain=False)


def load_engine(settings: Settings, checkpoint: Checkpoint, *, keep_gain: bool = True) -> PrefillEngine:
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
    if settings.verify_rate:
        # What is verified must be kept. Where that is impossible, no gain need be measured.
        engine.keep_verified({})
    if not settings.search_always:
        engine.require_gain(settings.min_gain, keep=keep_gain)
    logger.info("%s", _what_reuse_does(engine))
    return engine


def _what_reuse_does(engine: PrefillEngine) -> str:
    """Say in one line what reuse saves, and at which quality."""
    if engine.database is None or engine.policy is None:
        return "serving exactly: there is no database"
    if engine.reuse_off:
        return f"serving exactly: {'; '.join(engine.reuse_off)}"
    manifest, budget = engine.database.manifest, engine.policy.budget
    mean = manifest.quality.get("mean")
    kept = f"mean {budget.measure} {mean:.4f} of the hits" if mean and budget.binds else "no budget is kept"
    if engine.gain is None:
        if engine.approximates:
            return f"reusing attention whether it saves time here or not ({kept})"
        return f"serving exactly: {why_exact(manifest)}"
    saved = (
        f"{1 - 1 / (1 + engine.gain.together.full_batch):.0%} of the time of full batches and "
        f"{1 - 1 / (1 + engine.gain.together.one_text):.0%} of single texts here ({kept})"
    )
    if engine.approximates:
        return f"reusing attention: it saves {saved}"
    return f"serving exactly: reuse would save {saved}, too little for --min-gain {engine.gain.min_gain}"


def _open_database(settings: Settings, checkpoint: Checkpoint) -> AttentionDatabase:
    threshold = settings.policy.threshold if settings.policy else settings.threshold
    if settings.database is not None:
        return AttentionDatabase.open(settings.database, threshold=threshold, heads=settings.heads)
    with shown_progress() as progress:
        build_default_database(
            checkpoint,
            cache_dir=settings.cache_dir,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            progress=progress,
        )
    return open_default_database(checkpoint, settings.cache_dir, threshold=threshold, heads=settings.heads)


def configure_logging(level: str) -> None:
    """Log to stderr, a line each, from this level on."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # It tells of every start and stop step by step, and so do we.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
