"""Check the records in use again and again, slowly: bytes can change without a trace in the file's times.

A record is checked before its first use, and again after its file was written to. This check finds what is
left: bytes changed by a process that has mapped the file, by memory or by the disk.
"""

from __future__ import annotations

import logging
import threading

from attncache_core.attention_maps.store import AttentionMapStore
from service.metrics import Metrics

logger = logging.getLogger(__name__)

# A gigabyte in four minutes. A step takes a tenth of a millisecond, and serving is not measurably slower.
_BYTES_PER_SECOND = 4 * 2**20
_STEP_BYTES = 64 * 2**10
_SECONDS_BETWEEN_ROUNDS = 1.0


class Scrubber:
    """Owns the thread that checks the records of a database again and again, until it is stopped."""

    def __init__(self, store: AttentionMapStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Check nothing more; returns once the thread has ended, which takes it less than a millisecond."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_SECONDS_BETWEEN_ROUNDS):
            for step in self._store.scrub(_STEP_BYTES):
                self._tell(step.changed)
                if self._stopped.wait(step.bytes / _BYTES_PER_SECOND):
                    return

    def _tell(self, changed: int) -> None:
        if changed:
            logger.warning("records changed after they were checked, and are no longer used: %d", changed)
            self._metrics.observe_changed_records(changed)
