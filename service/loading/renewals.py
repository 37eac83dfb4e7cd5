"""Let a server follow the generations of its database, and what other servers find about it, while it serves.

    a look at DIR/current, once a second
      the same generation as before     nothing
      another one, which can be opened  serves from the next batch on; running batches keep the one before
      another one, which cannot         one line in the log; tried again after a minute, then ever more rarely

The gain of an engine is measured first, if it is not known (calibration/gain.py). The looks go on meanwhile.
If the mask and the weights of both generations are equal, the engines share the model. Otherwise a second
engine is loaded, and memory holds the model twice until the first has run its last batch.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial

from attncache_core import (
    AttentionDatabase,
    AttnCacheError,
    CorruptDatabase,
    DatabaseRefused,
    MachineBusy,
    PrefillEngine,
    require_gain,
)
from attncache_core.reuse.maps.generations import Generation, current_generation
from service.loading.engines import MEASURING_GAIN, load_replacement, prepare_reuse
from service.loading.regular_renewals import RegularRenewals
from service.loading.summary import expected_savings
from service.settings import Settings
from service.state import Loaded, Pause

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 60.0, 3600.0


def with_renewals(loaded: Iterator[Loaded], settings: Settings, *, renews: bool = True) -> Iterator[Loaded]:
    """Yield what is loaded and then, without an end, an engine for each generation that is published.

    renews: renew the database as --renew-hours says; False: another worker does. Ends if the last engine that
    was loaded has no database.
    """
    engine: PrefillEngine | None = None
    for each in loaded:
        engine = each if isinstance(each, PrefillEngine) else engine
        yield each
    if engine is None or engine.map_reuse is None:
        if settings.sample:
            logger.warning("no text is sampled, because there is no database of attention maps to renew")
        return
    if not (renews and settings.renew_hours):
        yield from _followed(engine, settings)
        return
    renewals = RegularRenewals(settings, engine.map_reuse.database.generation.root)
    try:
        for followed in _followed(engine, settings):
            renewals.look()
            yield followed
    finally:
        renewals.close()


def _followed(engine: PrefillEngine, settings: Settings) -> Iterator[Loaded]:
    """Yield an engine for each generation that is published, and pauses, without an end."""
    assert engine.map_reuse is not None
    served = engine.map_reuse.database
    seen: Generation | str = served.generation  # what the last look has found
    retry_at, wait, told = math.inf, _RETRY_SECONDS, ""
    while True:
        if engine.map_reuse.awaits_gain:
            goes_on = partial(_is_as_known, served, (served.generation, seen), retry_at)
            yield from _measuring_first(engine, settings, goes_on)
        yield Pause(SECONDS_BETWEEN_LOOKS)
        engine.map_reuse.adopt_findings()
        found = _look(served)
        if found == seen and time.monotonic() < retry_at:
            continue
        wait = _RETRY_SECONDS if found != seen else min(2 * wait, _MAX_RETRY_SECONDS)
        seen, retry_at = found, math.inf
        if found == served.generation:
            continue
        number = served.generation.number
        if isinstance(found, str):
            logger.error("%s; generation %d serves on", found, number)
            continue
        try:
            replacement = _of_current_generation(engine, served, settings)
            assert replacement.map_reuse is not None
            following = replacement.map_reuse.database
            seen = following.generation
            goes_on = partial(_is_as_known, following, (seen,), math.inf)
            yield from _measuring(replacement, engine, settings, goes_on)
        except Exception as error:
            expected = isinstance(error, AttnCacheError | OSError)
            before, told = told, f"generation {found.number} cannot be used: {error}"
            if told != before:
                logger.error("%s; generation %d serves on", told, number, exc_info=not expected)
            retry_at = time.monotonic() + wait
            continue
        if _look(served) == seen:
            logger.info("generation %d serves from now on, instead of generation %d", seen.number, number)
            engine, served = replacement, following
            yield engine
        del replacement


def _look(database: AttentionDatabase) -> Generation | str:
    """Return the generation that DIR/current names, or why it cannot be read."""
    try:
        return current_generation(database.generation.root)
    except CorruptDatabase as error:
        return str(error)


def _is_as_known(database: AttentionDatabase, known: Collection[Generation | str], retry_at: float) -> bool:
    """Return whether looks find what is known, which need not be tried before `retry_at`."""
    return time.monotonic() < retry_at and _look(database) in known


def _of_current_generation(
    engine: PrefillEngine, served: AttentionDatabase, settings: Settings
) -> PrefillEngine:
    """Return an engine for the generation that is current. Raises as load_replacement, and OSError."""
    opened = AttentionDatabase.open(served.generation.root, threshold=settings.threshold)
    if engine.shares_model_with(opened):
        replacement = engine.with_database(opened)
        prepare_reuse(replacement, settings)
        return replacement
    if engine.key_values is not None:
        # Stored keys and values are in the order of the heads.
        raise DatabaseRefused(
            "it reuses other heads, and this server stores keys and values; restart the server",
            field="database",
        )
    return load_replacement(engine, settings)


def _measuring_first(
    engine: PrefillEngine, settings: Settings, goes_on: Callable[[], bool]
) -> Iterator[Loaded]:
    """Measure the gain of the engine that serves, as `_measuring`. After an error, it reuses nothing."""
    reuse = engine.map_reuse
    assert reuse is not None
    try:
        yield from _measuring(engine, engine, settings, goes_on)
    except Exception as error:
        logger.error("the gain of reuse cannot be measured, so nothing is reused: %s", error, exc_info=True)
        reuse.reuse_in(())
        reuse.reuse_off.append("the gain of reuse cannot be measured; the log says why")
    else:
        if not reuse.awaits_gain:
            logger.info("reuse     %s", expected_savings(engine))


def _measuring(
    replacement: PrefillEngine, engine: PrefillEngine, settings: Settings, goes_on: Callable[[], bool]
) -> Iterator[Loaded]:
    """Measure the gain of the next engine while the present one serves, unless it is known.

    Waits while requests are computed, or other programs use the processors, as long as `goes_on`. Yields
    pauses meanwhile, and the present engine adopts what other servers find. Both may be the same engine.
    """
    reuse = replacement.map_reuse
    assert reuse is not None
    assert engine.map_reuse is not None
    wait, number = _RETRY_SECONDS, reuse.database.generation.number
    is_wanted = True

    def idle_mark() -> int | None:
        if not is_wanted:
            raise MachineBusy("another generation is current")
        return engine.runs.idle_mark()

    measure = partial(require_gain, replacement, settings.min_gain, idle_mark=idle_mark)
    while reuse.awaits_gain and (is_wanted := goes_on()):
        yield MEASURING_GAIN
        try:
            for pause in _while_running(measure, MEASURING_GAIN):
                engine.map_reuse.adopt_findings()
                yield pause
                is_wanted = goes_on()
        except MachineBusy as busy:
            if not is_wanted:
                return
            line = (
                f"{busy}: maps of generation {number} are not reused, and the gain is measured again in "
                f"{wait / 60:.0f} min"
            )
            yield line
            retry_at, wait = time.monotonic() + wait, min(2 * wait, _MAX_RETRY_SECONDS)
            while time.monotonic() < retry_at and goes_on():
                engine.map_reuse.adopt_findings()
                yield Pause(SECONDS_BETWEEN_LOOKS, line)
        finally:
            is_wanted = False  # a thread that measures ends, also if nobody asks for what is loaded any more


def _while_running(work: Callable[[], None], line: str) -> Iterator[Pause]:
    """Call a function in a thread, and yield a pause each second until it returns. Raises what it raises.

    line: what is prepared meanwhile.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    # A daemon, because the process does not wait for the measurement at its end.
    thread = threading.Thread(target=run, name="measure", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(SECONDS_BETWEEN_LOOKS)
        yield Pause(0.0, line)
    if failures:
        raise failures[0]
