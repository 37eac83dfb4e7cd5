"""`attncache serve`: read the options, load the engine and run the server."""

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
    KeyValueOptions,
    LinearClassifier,
    PrefillEngine,
    build_default_database,
    open_default_database,
    set_damaged_aside,
)
from attncache_core.calibration.gain import require_gain
from attncache_core.models.families import is_causal
from service.commands.database_report import why_exact
from service.commands.options import checkpoint_of, removed_settings_options, settings_options
from service.commands.progress import shown_progress
from service.settings import Settings, read_settings, refuse_unknown_variables
from service.upkeep.rebuild import build_while_serving
from service.upkeep.warming import read_warm_file, warm
from service.web.server import bind, run_server

logger = logging.getLogger(__name__)


@click.command("serve", params=[*settings_options(), *removed_settings_options()])
def serve(**values: Any) -> None:
    """Serve embeddings and classes over HTTP.

    Every option is also an environment variable. The exit code is 0 after SIGTERM, and 2 if an option, the
    model or the database is refused.
    """
    refuse_unknown_variables(os.environ)
    settings = read_settings(values)
    configure_logging(settings.log_level)
    # Before the server listens, so that a missing model is reported at once.
    checkpoint = checkpoint_of(settings)
    listener = bind(settings.host, settings.port)
    failure = run_server(settings, partial(load_engines, settings, checkpoint), listener)
    if isinstance(failure, AttnCacheError):
        raise failure
    if failure is not None:
        sys.exit(1)  # the traceback has been logged


def load_engines(settings: Settings, checkpoint: Checkpoint) -> Iterator[PrefillEngine]:
    """Yield the engine that these settings describe, or two engines if the default database is damaged.

    In that case the first engine reuses nothing, and serves while the damaged database is renamed and a new
    one is built. The second engine has the new database; if the build fails, there is no second engine.
    Raises the other errors of load_engine, also CorruptDatabase for a damaged `--database`.
    """
    try:
        engine = load_engine(settings, checkpoint)
    except CorruptDatabase as error:
        if settings.database is not None:
            raise
        logger.warning("%s; every text is computed in full until there is a new database", error)
        engine = load_engine(settings.model_copy(update={"maps": False}), checkpoint)
        engine.reuse_off.append("the default database is damaged, and a new one is being built")
        yield engine
    else:
        yield engine
        return
    try:
        rebuilt = _with_new_database(settings, checkpoint)
    except Exception as error:
        expected = isinstance(error, AttnCacheError | OSError)
        logger.warning("there is no new default database: %s", error, exc_info=not expected)
        engine.reuse_off[:] = ["the default database is damaged, and no new one could be built"]
    else:
        logger.info("the new default database is ready: attention maps are reused from now on")
        yield rebuilt


def _with_new_database(settings: Settings, checkpoint: Checkpoint) -> PrefillEngine:
    """Rename the damaged default database, build a new one, and return an engine with the new database.

    Raises OSError if the damaged database cannot be renamed, and BuildFailed.
    """
    aside = set_damaged_aside(checkpoint, settings.cache_dir)
    if aside is not None:
        logger.warning("the damaged database was set aside as %s; remove it if you do not need it", aside)
    build_while_serving(settings)
    # Times measured while requests are served are noisy, so the gain is not kept for later starts.
    return load_engine(settings, checkpoint, keep_gain=False)


def load_engine(settings: Settings, checkpoint: Checkpoint, *, keep_gain: bool = True) -> PrefillEngine:
    """Return the engine that these settings describe. Builds the default database on the first start.

    keep_gain: keep the measured gain of reuse with the database for later starts.
    """
    lines = read_warm_file(settings.warm) if settings.warm else []
    engine = PrefillEngine.load(
        checkpoint,
        database=_open_database(settings, checkpoint),
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        classifier=LinearClassifier.load(settings.classifier) if settings.classifier else None,
        fetch=settings.fetch,
        max_tokens=settings.max_tokens,
        key_values=_key_value_options(settings),
    )
    if engine.map_reuse:
        if settings.search_always:
            engine.map_reuse.search_always()
        if settings.verify_rate:
            # Verified hits must be kept. If they cannot be kept, reuse is off and no gain need be measured.
            engine.map_reuse.keep_verified({})
        if not settings.search_always:
            require_gain(engine, settings.min_gain, keep=keep_gain)
    logger.info("%s", _what_reuse_does(engine))
    if settings.warm:
        warm(engine, lines, settings)
    return engine


def _what_reuse_does(engine: PrefillEngine) -> str:
    """Return a line for the log: what reuse saves, at which quality, or why nothing is reused."""
    reuse = engine.map_reuse
    if engine.key_values:
        store = engine.key_values.store
        most = store.memory.pool.places * store.layout.block_bytes / 2**20
        disk = f" and {store.transfers.disk.most_bytes / 2**20:,.0f} MiB on disk" if store.transfers else ""
        return f"storing keys and values in up to {most:,.0f} MiB of memory{disk}"
    if reuse is None:
        return "serving exactly: there is no database"
    if reuse.reuse_off:
        return f"serving exactly: {'; '.join(reuse.reuse_off)}"
    manifest, budget = reuse.database.manifest, reuse.policy.budget
    mean = manifest.quality.get("mean")
    kept = f"mean {budget.measure} {mean:.4f} of the hits" if mean and budget.binds else "no budget is kept"
    if reuse.gain is None:
        if reuse.approximates:
            return f"reusing attention whether it saves time here or not ({kept})"
        return f"serving exactly: {why_exact(manifest)}"
    saved = (
        f"{1 - 1 / (1 + reuse.gain.together.full_batch):.0%} of the time of full batches and "
        f"{1 - 1 / (1 + reuse.gain.together.one_text):.0%} of single texts here ({kept})"
    )
    if reuse.approximates:
        return f"reusing attention: it saves {saved}"
    return f"serving exactly: reuse would save {saved}, too little for --min-gain {reuse.gain.min_gain}"


def _key_value_options(settings: Settings) -> KeyValueOptions | None:
    if not (settings.reuse and settings.kv):
        return None
    return KeyValueOptions(
        settings.kv_memory_bytes,
        settings.kv_eviction,
        settings.kv_dir,
        settings.kv_disk_bytes,
        settings.kv_disk_dtype,
    )


def _open_database(settings: Settings, checkpoint: Checkpoint) -> AttentionDatabase | None:
    overrides: dict[str, Any] = {"threshold": settings.threshold, "heads": settings.heads}
    if not (settings.reuse and settings.maps):
        return None
    if settings.database is not None:
        return AttentionDatabase.open(settings.database, **overrides)
    # Maps save a tenth of a causal model's time at best, and keys and values of prefixes save a multiple.
    if is_causal(checkpoint):
        return None
    with shown_progress() as progress:
        build_default_database(
            checkpoint,
            cache_dir=settings.cache_dir,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            progress=progress,
        )
    return open_default_database(checkpoint, settings.cache_dir, **overrides)


def configure_logging(level: str) -> None:
    """Log messages of this level and above to stderr, one line per message."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # uvicorn logs every step of start and stop, and the server logs these steps itself.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
