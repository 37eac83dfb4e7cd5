"""Load the engines that serve, one after the other, and say what is prepared meanwhile.

    the model alone                         serves within seconds; computes every text
    reuse of attention maps, if it is on
      a database exists, and its gain       serves, with reuse where the gain was measured to suffice
      a database exists, no gain            serves; reuses nothing until the gain is measured
      no default database, or a damaged one serves the model alone; then, behind the requests:
        could reuse pay on this machine?      seconds                       calibration/prospect.py
        build the database                    minutes, in another process   loading/rebuild.py
        load it: the next engine              replaces the first one between two batches

What follows the database from then on measures the gain (renewals.py). Measurements wait while requests are
computed. If other programs use the processors, a measurement decides nothing, and is tried again later.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from attncache_core import (
    AttentionDatabase,
    AttnCacheError,
    BuildFailed,
    Checkpoint,
    CorruptDatabase,
    DatabaseRefused,
    InvalidInput,
    KeyValueOptions,
    LinearClassifier,
    MachineBusy,
    PrefillEngine,
    UnsupportedModel,
    default_corpus,
    open_default_database,
    require_gain,
    set_damaged_aside,
)
from attncache_core.calibration.prospect import could_pay
from attncache_core.models.families import is_causal
from attncache_core.reuse.blend.gate import read_gate
from attncache_core.reuse.kv.remote import BlockValues
from attncache_core.reuse.maps.default import default_database_folder
from service.errors import reason_of
from service.loading.rebuild import build_while_serving
from service.loading.summary import expected_savings
from service.loading.warm_file import read_warm_file, warm
from service.settings import Settings
from service.state import Loaded

logger = logging.getLogger(__name__)

NO_DATABASE_YET = "there is no database of attention maps yet"
DAMAGED = "the default database is damaged, and a new one is being built"
NOT_BUILT = "there is no database of attention maps, and none could be built so far; the log says why"
CANNOT_PAY = (
    "no database of attention maps is built, because reuse cannot make this model as much faster on this "
    "machine as --min-gain asks for"
)
MEASURING_PROSPECT = "measuring whether reuse of attention maps could save time on this machine"
MEASURING_GAIN = "measuring how much time reuse of attention maps saves on this machine"
FIRST_WORKER_DECIDES = (
    "there is no database of attention maps; the first worker builds one if it can, and if reuse can pay on "
    "this machine"
)

_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 60, 3600
_SECONDS_BETWEEN_LOOKS = 2.0


def load_engines(settings: Settings, checkpoint: Checkpoint, *, builds: bool = True) -> Iterator[Loaded]:
    """Yield the engine that these settings describe, and what the server prepares behind it.

    builds: build a missing or damaged default database; False: wait until another worker has built it. Raises
    the errors of load_engine before the first engine, among them CorruptDatabase for a damaged `--database`.
    """
    missing = _takes_default(settings, checkpoint) and not _default_folder(settings, checkpoint).exists()
    reason = NO_DATABASE_YET
    if not missing:
        try:
            engine = load_engine(settings, checkpoint)
        except CorruptDatabase as error:
            if settings.database is not None:
                raise
            logger.warning("%s; every text is computed in full until there is a new database", error)
            reason = DAMAGED
        else:
            yield engine
            return
    engine = load_engine(settings.model_copy(update={"maps": False}), checkpoint)
    engine.reuse_off.append(reason)
    yield engine
    try:
        yield from _with_new_database(engine, settings, builds)
    except Exception as error:
        expected = isinstance(error, AttnCacheError | OSError)
        logger.warning("there is no new default database: %s", error, exc_info=not expected)
        engine.reuse_off[:] = [NOT_BUILT]


def _with_new_database(engine: PrefillEngine, settings: Settings, builds: bool) -> Iterator[Loaded]:
    """Build the default database while `engine` serves, and yield an engine with the database.

    Renames a damaged database first.
    """
    yield from _persistently(engine, partial(_set_damaged_aside, settings, engine.checkpoint))
    folder = _default_folder(settings, engine.checkpoint)
    if builds:
        if settings.min_gain > 0:
            prospect: list[bool] = []
            yield from _when_quiet(MEASURING_PROSPECT, lambda: prospect.append(_could_pay(engine, settings)))
            if not prospect[0]:
                engine.reuse_off[:] = [CANNOT_PAY]
                logger.info("reuse     %s", expected_savings(engine))
                return
        yield from _persistently(engine, partial(_build, engine, settings))
    else:
        engine.reuse_off[:] = [FIRST_WORKER_DECIDES]
        while not folder.exists():
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    yield load_replacement(engine, settings)


def _build(engine: PrefillEngine, settings: Settings) -> Iterator[str]:
    """Build the default database of the engine's model. Raises UnsupportedModel if its files were changed."""
    engine.checkpoint.as_it_is()  # the builder reads the files that it finds
    yield from build_while_serving(settings)
    if not _default_folder(settings, engine.checkpoint).exists():
        raise BuildFailed(
            "the files of the model were changed during the build; put them back, or restart the server"
        )


def _could_pay(engine: PrefillEngine, settings: Settings) -> bool:
    texts = [sentence.text for sentence in default_corpus()]
    lengths = Counter(len(ids) for ids in engine.tokenize(texts))
    return could_pay(engine, lengths, settings.min_gain, engine.runs.idle_mark)


def _when_quiet(line: str, measure: Callable[[], object]) -> Iterator[str]:
    """Measure, and try again later as long as other programs use the processors. Yields what is done."""

    def attempt() -> Iterator[str]:
        yield line
        measure()

    yield from _retried(attempt, MachineBusy, "measures")


def _set_damaged_aside(settings: Settings, checkpoint: Checkpoint) -> Iterator[str]:
    """Rename a damaged default database. Raises OSError if it cannot be renamed. Yields nothing."""
    aside = set_damaged_aside(checkpoint, settings.cache_dir)
    if aside is not None:
        logger.warning("the damaged database was set aside as %s; remove it if you do not need it", aside)
    yield from ()


def _persistently(engine: PrefillEngine, work: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Take a step towards a new default database, again and again until it succeeds. Yields what is done."""
    reasons = list(engine.reuse_off)

    def attempt() -> Iterator[str]:
        engine.reuse_off[:] = reasons
        try:
            yield from work()
        except (BuildFailed, OSError, UnsupportedModel) as failure:
            engine.reuse_off[:] = [NOT_BUILT]
            why = reason_of(failure)
            if isinstance(failure, OSError):
                why += "; free space on the disk, give another folder by --cache-dir, or serve with --no-maps"
            raise BuildFailed(f"there is no new default database: {why}") from failure

    yield from _retried(attempt, BuildFailed, "builds")


def _retried(attempt: Callable[[], Iterator[str]], failing: type[Exception], verb: str) -> Iterator[str]:
    """Yield the lines of an attempt, which is repeated after each error `failing`.

    verb: what the server does in an attempt, such as "builds".
    """
    seconds = _FIRST_RETRY_SECONDS
    while True:
        try:
            yield from attempt()
            return
        except failing as failure:
            yield f"{failure}: the server goes on without reuse, and {verb} again in {seconds // 60} min"
            time.sleep(seconds)
            seconds = min(2 * seconds, _MAX_RETRY_SECONDS)


def load_engine(settings: Settings, checkpoint: Checkpoint) -> PrefillEngine:
    """Return the engine that these settings describe, without a default database if there is none yet.

    If the gain of reuse is not known, the engine reuses nothing (MapReuse.awaits_gain).
    """
    lines = read_warm_file(settings.warm) if settings.warm else []
    engine = PrefillEngine.load(
        checkpoint,
        database=_open_database(settings, checkpoint),
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        classifier=LinearClassifier.load(settings.classifier) if settings.classifier else None,
        max_tokens=settings.max_tokens,
        key_values=_key_value_options(settings),
    )
    if settings.max_tokens is not None and settings.max_tokens > engine.tokenizer.max_tokens:
        logger.warning(
            "--max-tokens is %d, and the model takes %d: longer texts are cut to these",
            settings.max_tokens,
            engine.tokenizer.max_tokens,
        )
    _warn_of_options_without_effect(engine, settings)
    prepare_reuse(engine, settings)
    if settings.warm:
        warm(engine, lines, settings)
    return engine


def _warn_of_options_without_effect(engine: PrefillEngine, settings: Settings) -> None:
    """Log which given options of reuse have no effect with this model."""
    if engine.key_values is None:
        reason = engine.key_values_off
        for option in settings.given(("kv_dir", "kv_disk_bytes", "kv_disk_dtype")):
            logger.warning("%s has no effect, no keys and values are stored: %s", option, reason)
    if settings.maps and settings.database is None and not _takes_default(settings, engine.checkpoint):
        # --verify-rate has an effect on blended chunks.
        names = ("threshold", "min_gain") if settings.blend else ("threshold", "min_gain", "verify_rate")
        for option in settings.given(names):
            logger.warning("%s has no effect without --database: this model has no default database", option)


def load_replacement(engine: PrefillEngine, settings: Settings) -> PrefillEngine:
    """Return what `load_engine` returns, of the model and the classifier that the engine has.

    Raises UnsupportedModel, or DatabaseRefused, if their files were changed.
    """
    replacement = load_engine(settings, engine.checkpoint)
    if replacement.fingerprint != engine.fingerprint:
        raise DatabaseRefused(
            "the files of the classifier were changed since the start; put them back, or restart the server",
            field="classifier",
        )
    return replacement


def prepare_reuse(engine: PrefillEngine, settings: Settings) -> None:
    """Let an engine reuse maps where the gain is known to suffice, and blend chunks as the gate allows."""
    if engine.map_reuse:
        if address := settings.shared_for("findings"):
            from service.shared.findings import findings_of_all

            engine.map_reuse.share_findings(findings_of_all(address))
        if settings.verify_rate or address:
            # Verified hits must be kept. If they cannot be kept, reuse is off and no gain need be measured.
            engine.map_reuse.keep_verified({})
        require_gain(engine, settings.min_gain, measure=False)
    if settings.blend:
        _blend(engine, settings, settings.blend)


def _blend(engine: PrefillEngine, settings: Settings, path: Path) -> None:
    """Blend chunks as the gate in a file allows. Raises InvalidInput if the gate does not fit."""
    gate = read_gate(path)
    if gate.separator != settings.segment_separator:
        raise InvalidInput(
            f"{path} was measured with the separator {gate.separator!r}; give it as --segment-separator",
            field="segment_separator",
        )
    engine.open_gate(gate, path)
    if reason := gate.off():
        logger.warning("chunks are computed exactly: %s", reason)
    elif not settings.verify_rate:
        logger.warning("blended answers are not verified, because of --verify-rate 0")


def _key_value_options(settings: Settings) -> KeyValueOptions | None:
    if not (settings.reuse and settings.kv):
        return None
    shared: BlockValues | None = None
    if address := settings.shared_for("kv"):
        # Here, because without --shared nothing of it is imported.
        from service.shared.blocks import SharedBlocks

        shared = SharedBlocks(address)
    return KeyValueOptions(
        memory_bytes=settings.kv_memory_bytes,
        folder=settings.kv_dir,
        disk_bytes=settings.kv_disk_bytes,
        disk_dtype=settings.kv_disk_dtype,
        shared=shared,
    )


def _takes_default(settings: Settings, checkpoint: Checkpoint) -> bool:
    """Return whether the server reuses attention maps of the default database."""
    if not (settings.reuse and settings.maps) or settings.database is not None:
        return False
    # Maps save a tenth of a causal model's time at best, and keys and values of prefixes save a multiple.
    # Pairs take no maps.
    return not (is_causal(checkpoint) or checkpoint.is_for_pairs)


def _default_folder(settings: Settings, checkpoint: Checkpoint) -> Path:
    return default_database_folder(checkpoint, settings.cache_dir)


def _open_database(settings: Settings, checkpoint: Checkpoint) -> AttentionDatabase | None:
    if settings.reuse and settings.maps and isinstance(settings.database, Path):
        return AttentionDatabase.open(settings.database, threshold=settings.threshold)
    if not _takes_default(settings, checkpoint) or not _default_folder(settings, checkpoint).exists():
        return None
    return open_default_database(checkpoint, settings.cache_dir, threshold=settings.threshold)
