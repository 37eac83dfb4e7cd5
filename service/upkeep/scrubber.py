"""Check the records in use continuously and slowly, because bytes can change while a file's times do not.

A record is checked before its first use and after a write to its file. The scrubber finds the remaining
changes: bytes changed by a process that has mapped the file, by faulty memory or by the disk.
"""

from __future__ import annotations

import logging
import threading

from attncache_core.reuse.storage.store import AttentionMapStore
from service.observability.metrics import Metrics

logger = logging.getLogger(__name__)

# One gigabyte in four minutes. One step takes 0.1 ms, and serving is not measurably slower.
_BYTES_PER_SECOND = 4 * 2**20
_STEP_BYTES = 64 * 2**10
_SECONDS_BETWEEN_ROUNDS = 1.0


class Scrubber:
    """Owns the thread that checks the records of a database, round after round, until it is stopped."""

    def __init__(self, store: AttentionMapStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop checking. Returns after the thread has ended, in less than a millisecond."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_SECONDS_BETWEEN_ROUNDS):
            for step in self._store.scrub(_STEP_BYTES):
                if step.changed:
                    logger.warning(
                        "records changed after they were checked, and are no longer used: %d", step.changed
                    )
                    self._metrics.corrupt_records.inc(step.changed)
                if self._stopped.wait(step.bytes / _BYTES_PER_SECOND):
                    return
