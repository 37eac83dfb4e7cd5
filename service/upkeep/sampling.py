"""Keep a sample of the texts that clients ask for, from which the database can be renewed.

    an answered request -> offer -> waiting, up to a bound -> the thread, ten times a second -> TextSampler
                                                                          once a second      -> the disk

All texts that may reuse attention maps are candidates, hits and results of equal texts too: a sample of
misses would teach that odd texts are usual. If the disk fails, sampling pauses, and nothing else does.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from attncache_core.corpus.sample import TextSampler
from attncache_core.engine.request import PrefillPart
from service.errors import log_failure
from service.observability.metrics import Metrics

logger = logging.getLogger(__name__)

# Not seldom, because the event loop waits while the thread takes many texts.
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_SYNCS = 1.0
_RETRY_SECONDS = 60.0
# Tokens of texts that wait: 8 MB. A server answers fewer in a second.
_MAX_WAITING_TOKENS = 2**20


class _Answered(NamedTuple):
    """The texts of a request, which hold token ids of a user until the thread has seen them."""

    parts: Sequence[PrefillPart]
    client: str | None
    asked_at: float


@dataclass(slots=True)
class SampleState:
    """What /info says about sampling in this process."""

    texts: int = 0  # in the sample
    dropped: int = 0  # texts that came while too many waited, or while the disk failed
    problem: str | None = None  # why nothing is sampled at present


class Sampling:
    """Owns the sample of this process. Call `offer` on the event loop."""

    def __init__(self, max_texts: int, half_life_hours: float, metrics: Metrics) -> None:
        """max_texts, half_life_hours: see TextSampler.open."""
        self._options: dict[str, Any] = {"max_texts": max_texts, "half_life_hours": half_life_hours}
        self._metrics = metrics
        self.state = SampleState()
        self._lock = threading.Lock()  # of what waits
        self._waiting: list[_Answered] = []
        self._waiting_tokens = 0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        metrics.follow(metrics.sample_texts, lambda: self.state.texts)

    def begin(self, root: Path) -> None:
        """Sample from now on into a database's folder. Later calls do nothing: generations share a folder."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(root,), name="sampling", daemon=True)
            self._thread.start()

    def offer(self, client: str | None, parts: Sequence[PrefillPart]) -> None:
        """Let the texts of a request that was answered take part. client: name of the API key."""
        if self._thread is None:
            return
        tokens = sum(part.tokens for part in parts)
        with self._lock:
            is_full = self._waiting_tokens + tokens > _MAX_WAITING_TOKENS
            if not is_full:
                self._waiting.append(_Answered(parts, client, time.time()))
                self._waiting_tokens += tokens
        if is_full:
            self._drop(sum(map(len, parts)))

    def close(self) -> None:
        """Keep what waits, and end the thread. Blocks."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _drop(self, texts: int) -> None:
        self.state.dropped += texts
        self._metrics.unsampled.inc(texts)

    # In the thread.

    def _run(self, root: Path) -> None:
        try:
            while not self._ended.is_set():
                try:
                    self._sample(root)
                except OSError as error:
                    self._pause(error, root)
        except BaseException as error:
            log_failure(logger, "sampling ended", error)
            self.state.problem = "sampling ended by an internal error"

    def _sample(self, root: Path) -> None:
        """Sample until the end. Raises OSError."""
        if not root.is_dir():  # set aside: a new folder would be in the way of the next database
            raise FileNotFoundError(errno.ENOENT, "the folder of the database is missing")
        with closing(TextSampler.open(root, **self._options)) as sampler:
            if sampler.cut_bytes:
                logger.warning(
                    "%d bytes at the end of a log in %s were unfinished or damaged, and are cut off",
                    sampler.cut_bytes,
                    root / "sample",
                )
            if sampler.later:
                logger.warning(
                    "%d sampled texts were asked later than now, by this machine's clock, and take no part; "
                    "set the clock right and start the server again",
                    sampler.later,
                )
            self.state.texts = len(sampler)
            synced, is_last = time.monotonic(), False
            while not is_last:
                is_last = self._ended.wait(_SECONDS_BETWEEN_LOOKS)
                for answered in self._take():
                    _offer(answered, sampler)
                self.state.texts = len(sampler)
                if is_last or time.monotonic() - synced >= _SECONDS_BETWEEN_SYNCS:
                    self._sync(sampler)
                    synced = time.monotonic()

    def _sync(self, sampler: TextSampler) -> None:
        """Write to the disk. Raises OSError."""
        try:
            if sampler.sync():
                self.state.problem = None
        except OSError:
            self._drop(sampler.unsynced)
            raise

    def _pause(self, error: OSError, root: Path) -> None:
        """Drop what waits, and wait before the next try."""
        problem = f"texts cannot be sampled: {error.strerror or type(error).__name__}"
        if problem != self.state.problem:
            logger.error(
                "%s (%s); the server goes on without, and tries again every minute", problem, root / "sample"
            )
        self.state.problem = problem
        self._ended.wait(_RETRY_SECONDS)
        self._drop(sum(len(part) for answered in self._take() for part in answered.parts))

    def _take(self) -> list[_Answered]:
        with self._lock:
            taken, self._waiting, self._waiting_tokens = self._waiting, [], 0
        return taken


def _offer(answered: _Answered, sampler: TextSampler) -> None:
    for part in answered.parts:
        # No database holds pairs.
        if part.pairs is None:
            for first, stop in pairwise(part.offsets):
                sampler.offer(part.ids[first:stop], answered.client, answered.asked_at)
