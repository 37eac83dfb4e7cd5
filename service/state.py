"""The life of one app: loading in the background, serving, finishing what is queued.

start -> loading (a daemon thread) -> Serving (-> another engine in its place) -> close
                                   -> failure, told to `on_failure`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attncache_core import AttnCacheError, NoClassifier, PrefillEngine
from service.batcher import Batcher, Limits
from service.errors import NotReady
from service.labels import LabelMemory
from service.metrics import Metrics
from service.scrubber import Scrubber
from service.settings import Settings
from service.verifier import Verifier

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Serving:
    """What a request needs once the engine is loaded."""

    engine: PrefillEngine
    batcher: Batcher
    label_memory: LabelMemory
    scrubber: Scrubber | None  # where there is a database


class ServiceState:
    """One app's settings, metrics and, when it is loaded, its engine."""

    def __init__(
        self,
        settings: Settings,
        load_engines: Callable[[], Iterator[PrefillEngine]],
        on_failure: Callable[[BaseException], None] | None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._load_engines = load_engines
        self._on_failure = on_failure
        self._serving: Serving | None = None

    def serving(self) -> Serving:
        """Engine and batcher; raises NotReady while they are being loaded."""
        if self._serving is None:
            raise NotReady(
                "the model and its database are being loaded",
                retry_after_seconds=_RETRY_SECONDS,
            )
        return self._serving

    def start(self) -> None:
        """Begin to load; returns at once. Called on the event loop."""
        # No executor: at exit Python would wait for its threads, and a database can take minutes to build.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, args=(loop,), name="load", daemon=True).start()

    async def close(self) -> None:
        """Finish what is queued."""
        if self._serving is not None:
            if self._serving.scrubber:
                self._serving.scrubber.stop()
            await asyncio.to_thread(self._serving.batcher.close)

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        started = time.perf_counter()
        try:
            for engine in self._load_engines():
                verifier = self._verifier(engine)
                # The fingerprint is computed here: it takes the time to read the weights.
                fingerprint = engine.fingerprint[:12]
                seconds = time.perf_counter() - started
                logger.info("loaded model %s, %.1f s after the start", fingerprint, seconds)
                self._tell(loop, self._loaded, engine, verifier)
        except BaseException as error:
            if not isinstance(error, AttnCacheError):
                # With its message: loading sees no text of a client.
                logger.exception("loading failed")
            self._tell(loop, self._failed, error)

    def _tell(self, loop: asyncio.AbstractEventLoop, hear: Callable[..., None], *news: object) -> None:
        # A loop that was closed meanwhile does not care any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(hear, *news)

    def _loaded(self, engine: PrefillEngine, verifier: Verifier | None) -> None:
        scrubber = Scrubber(engine.database.search.store, self.metrics) if engine.database else None
        if self._serving is None:
            limits = Limits(
                batch_tokens=self.settings.max_batch_tokens,
                batch_sequences=self.settings.max_batch_sequences,
                queue_sequences=self.settings.max_queue_sequences,
                request_tokens=self.settings.max_request_tokens,
            )
            batcher = Batcher(engine, limits, self.metrics, verifier)
            self._serving = Serving(engine, batcher, LabelMemory(), scrubber)
        else:
            # The engine that served so far had no database, and so no scrubber.
            self._serving.batcher.replace_engine(engine, verifier)
            self._serving = replace(self._serving, engine=engine, scrubber=scrubber)
        batcher = self._serving.batcher
        self.metrics.watch(lambda: batcher.waiting_sequences, engine.info)

    def _verifier(self, engine: PrefillEngine) -> Verifier | None:
        rate = self.settings.verify_rate
        if engine.policy is None or rate == 0:
            return None
        try:
            return Verifier(engine, engine.policy, rate, self.metrics)
        except NoClassifier as error:
            logger.warning("hits are not verified: %s", error)
            return None

    def _failed(self, error: BaseException) -> None:
        if self._serving is not None:
            logger.warning("no other engine takes the place of the one that serves: %s", error)
        elif self._on_failure is not None:
            self._on_failure(error)
