"""`attncache serve`: read the options, load the engine and run the server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from attncache_core import (
    AttentionDatabase,
    AttnCacheError,
    Checkpoint,
    CorruptDatabase,
    InvalidInput,
    KeyValueOptions,
    LinearClassifier,
    PrefillEngine,
    build_default_database,
    open_default_database,
    set_damaged_aside,
)
from attncache_core.build.default import default_database_folder
from attncache_core.calibration.gain import require_gain
from attncache_core.models.families import is_causal
from attncache_core.reuse.blend.gate import read_gate
from service.commands.options import checkpoint_of
from service.commands.progress import shown_progress
from service.commands.settings_options import SettingsCommand, given_options
from service.commands.summary import slowness, summary
from service.observability.logs import configure_logging
from service.settings import Settings, gather_settings
from service.upkeep.rebuild import build_while_serving
from service.upkeep.warming import read_warm_file, warm
from service.web.listeners import open_listeners
from service.workers.supervisor import serve_with_workers

logger = logging.getLogger(__name__)


@click.command("serve", cls=SettingsCommand)
@click.pass_context
def serve(context: click.Context, /, config: Path | None, **_: Any) -> None:
    """Serve embeddings and classes over HTTP.

    Every option is also an environment variable, and a key of the file of --config. The exit code is 0 after
    SIGTERM, and 2 if an option, the model or the database is refused.
    """
    settings = gather_settings(given_options(context), config)
    configure_logging(settings.log_level, settings.log_format)
    # Before the server listens, so that a missing model is reported at once.
    checkpoint = checkpoint_of(settings)
    listeners = open_listeners(settings)
    urls = [listener.url for listener in listeners]

    def load(share: Settings, worker: int) -> Iterator[PrefillEngine]:
        # The other workers start when the first one serves, and would keep the server from getting ready.
        engines = load_engines(share, checkpoint, builds=worker == 0)
        return _summarised(engines, share, urls) if worker == 0 else engines

    failure = serve_with_workers(settings, load, listeners)
    if isinstance(failure, AttnCacheError):
        raise failure
    sys.exit(1)  # the traceback has been logged


def _summarised(
    engines: Iterator[PrefillEngine], settings: Settings, urls: Sequence[str]
) -> Iterator[PrefillEngine]:
    """Yield each engine, after its summary was logged."""
    for engine in engines:
        if slow := slowness(engine.info()):
            logger.warning("%s", slow)
        for line in summary(engine, settings, urls):
            logger.info("%s", line)
        yield engine


def load_engines(
    settings: Settings, checkpoint: Checkpoint, *, builds: bool = True
) -> Iterator[PrefillEngine]:
    """Yield the engine that these settings describe, or two engines if the default database is damaged.

    In that case the first engine reuses nothing, and serves while the damaged database is renamed and a new
    one is built. The second engine has the new database; if the build fails, there is no second engine.
    builds: build a missing default database first; False: a missing one is like a damaged one. Raises the
    other errors of load_engine, also CorruptDatabase for a damaged `--database`.
    """
    try:
        engine = load_engine(settings, checkpoint, builds=builds)
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


def load_engine(
    settings: Settings, checkpoint: Checkpoint, *, keep_gain: bool = True, builds: bool = True
) -> PrefillEngine:
    """Return the engine that these settings describe. Builds the default database on the first start.

    keep_gain: keep the measured gain of reuse with the database for later starts. builds: False raises
    CorruptDatabase if there is no default database.
    """
    lines = read_warm_file(settings.warm) if settings.warm else []
    engine = PrefillEngine.load(
        checkpoint,
        database=_open_database(settings, checkpoint, builds),
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        classifier=LinearClassifier.load(settings.classifier) if settings.classifier else None,
        fetch=settings.fetch,
        max_tokens=settings.max_tokens,
        key_values=_key_value_options(settings),
    )
    if settings.max_tokens is not None and settings.max_tokens > engine.max_tokens:
        logger.warning(
            "--max-tokens is %d, and the model takes %d: longer texts are cut to these",
            settings.max_tokens,
            engine.max_tokens,
        )
    if engine.map_reuse:
        if settings.search_always:
            engine.map_reuse.search_always()
        if settings.verify_rate:
            # Verified hits must be kept. If they cannot be kept, reuse is off and no gain need be measured.
            engine.map_reuse.keep_verified({})
        if not settings.search_always:
            require_gain(engine, settings.min_gain, keep=keep_gain)
    if settings.blend:
        _blend(engine, settings, settings.blend)
    if settings.warm:
        warm(engine, lines, settings)
    return engine


def _blend(engine: PrefillEngine, settings: Settings, path: Path) -> None:
    """Blend chunks as the gate in a file allows. Raises InvalidInput if the gate does not fit."""
    gate = read_gate(path)
    if gate.separator != settings.segment_separator:
        raise InvalidInput(
            f"{path} was measured with the separator {gate.separator!r}; give it as --segment-separator",
            field="segment_separator",
        )
    engine.blending.open(gate, path)
    if reason := gate.off():
        logger.warning("chunks are computed exactly: %s", reason)
    elif not settings.verify_rate:
        logger.warning("blended answers are not verified, because of --verify-rate 0")


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


def _open_database(settings: Settings, checkpoint: Checkpoint, builds: bool) -> AttentionDatabase | None:
    overrides: dict[str, Any] = {"threshold": settings.threshold, "heads": settings.heads}
    if not (settings.reuse and settings.maps):
        return None
    if settings.database is not None:
        return AttentionDatabase.open(settings.database, **overrides)
    # Maps save a tenth of a causal model's time at best, and keys and values of prefixes save a multiple.
    # Pairs take no maps.
    if is_causal(checkpoint) or checkpoint.is_for_pairs:
        return None
    if not builds and not default_database_folder(checkpoint, settings.cache_dir).exists():
        raise CorruptDatabase("there is no default database yet", field="database")
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
