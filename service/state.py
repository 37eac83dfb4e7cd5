"""The life of one app: load in the background, serve, finish queued requests.

start -> loading (a daemon thread) -> Serving (-> the engine is replaced) -> close
                                   -> failure, reported to `on_failure`

The thread goes on behind the requests: it measures, waits for a new database or a new generation of it, and
loads the next engine; see loading/engines.py and loading/renewals.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attncache_core import AttnCacheError, NoClassifier, PrefillEngine
from service.access.keys import key_ring
from service.batching.admission import Limits
from service.batching.batcher import Batcher
from service.conversations.sessions import CAPACITY_BYTES, Sessions
from service.errors import NotReady, QueueFull
from service.labels import LabelMemory
from service.observability.finished import FinishedRequests
from service.observability.logs import log_access
from service.observability.metrics import Metrics
from service.observability.tracing import tracing_of
from service.settings import Settings
from service.store import LocalStore, SqliteStore, Store
from service.upkeep.blend_verifier import BlendVerifier
from service.upkeep.group import Group, Worker, repeated
from service.upkeep.sampling import Sampling
from service.upkeep.scrubber import Scrubber
from service.upkeep.verifier import Verifier
from service.upkeep.verifying import LaterVerifier
from service.upkeep.watchdog import Condition, Watchdog

if TYPE_CHECKING:
    from service.shared.findings import FindingsOfAll
    from service.shared.store import SharedStores

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pause:
    """What loads has nothing to do for some seconds, unless the app ends before."""

    seconds: float
    preparing: str | None = None  # what is prepared meanwhile, in one line


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A look at a database in an object store has failed. The log says why."""


# The engine that serves from now on, a line about what is prepared behind the requests, a pause or a failure.
Loaded = PrefillEngine | str | Pause | FetchFailed

_RETRY_SECONDS = 2
_LOOK_SECONDS = 2.0
_DROP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts that answer requests once the engine is loaded."""

    engine: PrefillEngine
    batcher: Batcher
    label_memory: LabelMemory
    scrubber: Scrubber | None  # None without a database


class ByteBudget:
    """Counts the bytes that clients keep in memory. Used on the event loop."""

    def __init__(self, maximum: int, kept: str) -> None:
        """maximum: bytes of all requests together. kept: the bytes of what, for the message of an error."""
        self.maximum = maximum
        self._kept = kept
        self.taken = 0

    @property
    def is_half_taken(self) -> bool:
        """Whether more than half of the bytes are taken."""
        return self.taken > self.maximum / 2

    def take(self, count: int) -> None:
        """Count bytes as kept. Raises QueueFull if they would be too many."""
        if self.taken + count > self.maximum:
            raise QueueFull(
                f"{self.taken} bytes of {self._kept} are kept, and at most {self.maximum} may be; send the "
                "request again later",
            )
        self.taken += count

    def give(self, count: int) -> None:
        """Count bytes as free."""
        self.taken -= count


class ServiceState:
    """Owns one app's settings, metrics and sessions and, once the engine is loaded, the parts that serve."""

    def __init__(
        self,
        settings: Settings,
        load_engines: Callable[[], Iterator[Loaded]],
        on_failure: Callable[[BaseException], None] | None,
        worker: Worker | None = None,
    ) -> None:
        """worker: this process, if several share what is stored; None: it serves alone.

        Raises StoreUnavailable if several processes cannot share anything.
        """
        self.settings = settings
        self.metrics = Metrics()
        bounds = settings.max_sessions, CAPACITY_BYTES
        shared = worker.store("shared") if worker else LocalStore()
        self._stores: list[LocalStore | SqliteStore] = [shared]  # of this process or of this machine
        self._of_all = _shared_stores(settings, self.metrics)
        self._findings = _shared_findings(settings)
        parts = [part for part in (self._of_all, self._findings) if part is not None]
        if parts:
            self.metrics.follow(self.metrics.shared_away, lambda: any(part.circuit.is_away for part in parts))
        self.group = Group(worker, shared, self.metrics) if worker else None
        histories: Store
        others_write = settings.shared_for("sessions") is not None
        if self._of_all is not None and others_write:
            histories = self._of_all.store("sessions")
        else:
            # No file is opened that no worker keeps open: SQLite would remove parts of it, and the supervisor
            # ends the server where files of its workers are gone.
            local = worker.store("sessions", *bounds) if worker else LocalStore(*bounds)
            self._stores.append(local)
            histories = local
        self.sessions = Sessions(
            histories,
            shared,
            *([self.group.process] if self.group else []),
            ttl_seconds=settings.session_ttl_seconds,
            max_waiting=settings.max_queue_sequences,
            max_seconds=settings.request_seconds,
            others_write=others_write,
        )
        self.bodies = ByteBudget(settings.max_inflight_bytes, "requests that are being answered")
        self.answers = ByteBudget(
            settings.max_inflight_bytes, "answers that are being made, or were not read yet,"
        )
        self.watchdog = Watchdog(
            settings.stuck_seconds,
            exit_when_stuck=settings.exit_when_stuck,
            # Other workers show it, also while the event loop of this one hangs.
            tell=self.metrics.overdue_seconds.set,
        )
        # None: no text is kept.
        self.sampling = (
            Sampling(settings.sample_texts, settings.sample_half_life_hours, self.metrics)
            if settings.sample
            else None
        )
        self.explaining = asyncio.Lock()  # held while a text is explained: one at a time
        self.tokenizing = asyncio.Lock()  # held while a request is tokenised or decoded: one at a time
        self.writing = asyncio.Lock()  # held while a further part of a large answer is made: one at a time
        self.draining = False  # the process ends once the requests in flight are answered
        # Called when SIGHUP asks to read files again. They raise AttnCacheError if a file cannot be used.
        self.reloads: list[Callable[[], None]] = []
        # None: no key is needed.
        of_all = [self._of_all.store("quotas")] if self._of_all and settings.shared_for("quotas") else []
        self.keys = key_ring(settings, *of_all, shared, process=self.group.process if self.group else None)
        if self.keys is not None:
            self.metrics.watch_keys(self.keys.names)
        if settings.api_keys is not None:
            self.reloads.append(self._reload_keys)
        self._tracing = tracing_of(os.environ)
        tracers = [self._tracing.record] if self._tracing is not None else []
        consumers = [*([log_access] if settings.access_log else []), *tracers]
        self.finished = FinishedRequests(consumers) if consumers else None  # None: nobody is told of requests
        self._load_engines = load_engines
        self._on_failure = on_failure
        self._serving: Serving | None = None
        self.preparing: str | None = None  # what is prepared behind the requests, in one line
        self._ended = threading.Event()  # set when the app ends
        self._repeated: list[asyncio.Task[None]] = []

    def serving(self) -> Serving:
        """Return the engine and its parts. Raises NotReady while the engine is loading."""
        if self._serving is None:
            raise NotReady(
                "the model, or the database of --database, is being loaded",
                retry_after_seconds=_RETRY_SECONDS,
            )
        return self._serving

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent here."""
        return self._serving is not None and not self.draining and self.watchdog.condition is Condition.FINE

    def start(self) -> None:
        """Start loading and return at once. Called on the event loop."""
        # A thread and no executor: at exit Python would wait for an executor's threads, and building a
        # database can take minutes.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, args=(loop,), name="load", daemon=True).start()
        self.watchdog.start(loop)
        self._repeated.append(loop.create_task(repeated(self._drop_expired, _DROP_SECONDS)))
        if self.settings.shared is not None:
            look = repeated(self._look_at_other_machines, _LOOK_SECONDS)
            self._repeated.append(loop.create_task(look))
        if self.finished is not None:
            self.finished.start()

    async def close(self) -> None:
        """Finish queued requests and stop all threads."""
        self._ended.set()
        for task in self._repeated:
            task.cancel()
        if self._serving is not None:
            if self._serving.scrubber:
                self._serving.scrubber.stop()
            await asyncio.to_thread(self._serving.batcher.close)
            if self.sampling is not None:
                await asyncio.to_thread(self.sampling.close)
            await asyncio.to_thread(self._serving.engine.close)
        if self.finished is not None:
            await asyncio.to_thread(self.finished.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        self.watchdog.stop()
        if self._of_all is not None:
            await self._of_all.close()
        if self._findings is not None:
            await asyncio.to_thread(self._findings.close)

    async def _drop_expired(self) -> None:
        """Drop histories that have expired, because they hold users' texts, also if no request comes."""
        for store in self._stores:
            await store.drop_expired()

    async def _look_at_other_machines(self) -> None:
        if self._serving is not None and self._findings is not None:
            await asyncio.to_thread(_exchange_findings, self._serving)
        await self.sessions.remove_outdated()

    def _reload_keys(self) -> None:
        assert self.keys is not None
        self.keys.reload()
        self.metrics.watch_keys(self.keys.names)

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        started = time.perf_counter()
        try:
            for loaded in self._load_engines():
                if isinstance(loaded, Pause):
                    self.preparing = loaded.preparing
                    if self._ended.wait(loaded.seconds):
                        return
                    continue
                if isinstance(loaded, FetchFailed):
                    self.metrics.fetch_failures.inc()
                    continue
                if isinstance(loaded, str):
                    self.preparing = loaded
                    logger.info("%s", loaded)
                    continue
                verifier = self._verifier(loaded)
                # Computed in this thread, because the fingerprint reads all weight files.
                fingerprint = loaded.fingerprint[:12]
                if self.group is not None:
                    self.group.worker.require_model(loaded.fingerprint)
                seconds = time.perf_counter() - started
                database = " with a database" if loaded.map_reuse else ""
                logger.info("loaded model %s%s, %.1f s after the start", fingerprint, database, seconds)
                self._call_on(loop, self._loaded, loaded, verifier)
        except BaseException as error:
            if not isinstance(error, AttnCacheError):
                # Logged with its message, because loading sees no text of a client.
                logger.exception("loading failed")
            self._call_on(loop, self._failed, error)
        finally:
            self.preparing = None

    def _call_on(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object
    ) -> None:
        # call_soon_threadsafe raises RuntimeError if the loop has been closed: then the app has ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, *arguments)

    def _loaded(self, engine: PrefillEngine, verifier: LaterVerifier | None) -> None:
        if self._ended.is_set():  # nobody would stop what starts here
            return
        scrubber = Scrubber(engine.map_reuse.search.store, self.metrics) if engine.map_reuse else None
        if self._serving is None:
            limits = Limits(
                batch_tokens=self.settings.max_batch_tokens,
                batch_sequences=self.settings.max_batch_sequences,
                queue_sequences=self.settings.max_queue_sequences,
                request_tokens=self.settings.max_request_tokens,
                queue_seconds=self.settings.max_queue_seconds,
            )
            batcher = Batcher(
                engine,
                limits,
                self.metrics,
                verifier,
                result_bytes=self.settings.result_memory_bytes if self.settings.reuse else 0,
                watching=self.watchdog.watching,
            )
            self._serving = Serving(engine, batcher, LabelMemory(), scrubber)
        else:
            before, former = self._serving, self._serving.batcher.verifier
            before.batcher.replace_engine(engine, verifier)
            self._serving = replace(before, engine=engine, scrubber=scrubber)
            if before.scrubber is not None:
                before.scrubber.stop()
            if former is not None:
                # In a thread, because keeping findings can wait for the lock of another server.
                threading.Thread(target=former.retire, name="retire", daemon=True).start()
        if self.sampling is not None and engine.map_reuse is not None:
            self.sampling.begin(engine.map_reuse.database.generation.root)
        if self.group is not None:
            self.group.verifier, self.group.is_serving = verifier, True
        batcher = self._serving.batcher
        self.metrics.watch(
            engine.info,
            lambda: batcher.queue.waiting_sequences,
            lambda: batcher.queue.waiting_tokens,
            lambda: batcher.kept_bytes,
        )

    def _verifier(self, engine: PrefillEngine) -> LaterVerifier | None:
        rate = self.settings.verify_rate
        if rate == 0 or (engine.map_reuse is None and engine.blending.gate is None):
            return None
        try:
            if engine.blending.gate is not None:
                return BlendVerifier(engine, rate, self.metrics)
            return Verifier(engine, rate, self.metrics)
        except NoClassifier as error:
            logger.warning("hits are not verified: %s", error)
            return None

    def _failed(self, error: BaseException) -> None:
        if self._serving is not None:
            logger.warning("the engine that serves could not be replaced: %s", error)
        elif self._on_failure is not None:
            self._on_failure(error)


def _exchange_findings(serving: Serving) -> None:
    """Exchange findings with servers on other machines, also if no map is verified here."""
    if isinstance(verifier := serving.batcher.verifier, Verifier):
        verifier.exchange()
    elif serving.engine.map_reuse is not None:
        serving.engine.map_reuse.keep_verified({})


def _shared_stores(settings: Settings, metrics: Metrics) -> SharedStores | None:
    """Return the stores for what all machines share; None if they share neither sessions nor quotas."""
    address = settings.shared_for("sessions", "quotas")
    if address is None:
        return None
    # Here, because without --shared nothing of it is imported.
    from service.shared.store import SharedStores

    return SharedStores(address, lambda use: metrics.shared_failures.labels(use).inc())


def _shared_findings(settings: Settings) -> FindingsOfAll | None:
    """Return what exchanges findings with other machines; None if they do not share findings."""
    address = settings.shared_for("findings")
    if address is None:
        return None
    from service.shared.findings import findings_of_all

    return findings_of_all(address)
