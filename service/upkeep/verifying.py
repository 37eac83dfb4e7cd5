"""Hits that wait to be computed again in full: what the verifiers of all kinds of reuse share.

The batcher calls a verifier: a few sequences at a time after the answers were sent, while no request waits
for the engine or is computed; if too many hits are pending, a few after each batch.
"""

from __future__ import annotations

import logging
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from attncache_core import PrefillEngine, PrefillRequest, PrefillResult
from attncache_core.reuse.maps.verification import Window
from service.errors import log_failure
from service.observability.metrics import Metrics

logger = logging.getLogger(__name__)

# A request that arrives during one verification batch waits a few milliseconds for the batch. A sequence that
# is longer than the budget is verified alone.
_BATCH_SEQUENCES = 8
_BATCH_TOKENS = 128
# From this number of pending hits on, hits are verified even while requests wait, so that hits are verified
# under endless load too.
_OVERDUE = 64
_MAX_PENDING = 256


class Hit(NamedTuple):
    """A hit to be verified. Token ids are a user's text, so they are not kept beyond the verification."""

    request: PrefillRequest
    output: np.ndarray  # float32 [dimensions], the output that the client got
    window: Window  # the window that the hit counts in


class LaterVerifier(ABC):
    """Owns hits to be verified.

    Any thread may call `offer`, `verify_some`, `stop`, `has_work` and `is_overdue`. One thread verifies at a
    time. Any thread may call `close` after the engine threads have ended, and `retire` before.
    """

    def __init__(
        self, engine: PrefillEngine, rate: float, metrics: Metrics, chance: random.Random | None = None
    ) -> None:
        """rate: share of the hits to verify. chance: picks the hits; None: at random."""
        self._engine, self._rate, self._metrics = engine, rate, metrics
        self._chance = chance or random.Random()
        self._pending: deque[Hit] = deque()
        self._pending_lock = threading.Lock()
        self._verifying = threading.Lock()
        self._stopped = False

    @property
    @abstractmethod
    def subject(self) -> str:
        """What the steps of `steps` are counted from: an id, equal in all processes."""

    @property
    @abstractmethod
    def policy(self) -> Any:
        """What decided about the hits of a batch; changes when it is tightened."""

    @abstractmethod
    def offer(self, requests: Sequence[PrefillRequest], result: PrefillResult, policy: Any) -> None:
        """Choose some hits of an answered batch for verification.

        policy: `policy` before the batch was run. If it was tightened meanwhile, the hits do not count.
        """

    @abstractmethod
    def close(self) -> None:
        """Keep findings that are not kept yet. Waits at most a second for another server's lock."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Return how often each part of the policy was tightened."""

    @abstractmethod
    def _follow(self, steps: list[int]) -> None:
        """Tighten the policy until each part was tightened this often."""

    @abstractmethod
    def _verify(self, hits: list[Hit]) -> None:
        """Compute hits in full, and tighten the policy if they fail the budget."""

    @property
    def has_work(self) -> bool:
        """Whether hits are pending."""
        return bool(self._pending)

    @property
    def is_overdue(self) -> bool:
        """Whether so many hits are pending that some must be verified even while requests wait."""
        return len(self._pending) >= _OVERDUE

    def stop(self) -> None:
        """Verify no more hits, so that a server can shut down without waiting."""
        self._stopped = True
        self._keep_pending(lambda _: False)

    def retire(self) -> None:
        """Verify no more hits, and keep findings, because another engine serves. Waits while hits are
        verified."""
        self.stop()
        with self._verifying:
            self.close()

    def follow(self, steps: list[int]) -> None:
        """Make the policy as tight as another process has found it must be. Waits while hits are verified."""
        with self._verifying:
            self._follow(steps)

    def verify_some(self) -> None:
        """Compute a few pending hits in full, oldest first, and tighten the policy if hits fail the budget.

        Does nothing while another thread verifies. Raises nothing: if verification fails, the failure is
        logged and the hits count as unverified.
        """
        if not self._verifying.acquire(blocking=False):
            return
        hits: list[Hit] = []
        try:
            hits = self._take()
            if hits:  # another thread may have taken or dropped the last ones
                self._verify(hits)
        # A panic in compiled code is not an Exception, and serving must go on.
        except BaseException as error:
            log_failure(logger, "verifying hits failed", error)
            self._metrics.unverified.inc(len(hits))
        finally:
            self._verifying.release()

    def _add(self, chosen: Sequence[Hit]) -> None:
        """Let hits wait. Beyond a bound, the oldest ones are dropped, and after `stop` all of them."""
        with self._pending_lock:
            self._pending += chosen
            surplus = max(0, len(self._pending) - (0 if self._stopped else _MAX_PENDING))
            for _ in range(surplus):
                self._pending.popleft()
        self._metrics.unverified.inc(surplus)

    def _keep_pending(self, is_current: Callable[[Hit], bool]) -> None:
        """Drop the pending hits for which `is_current` is false."""
        with self._pending_lock:
            current = deque(hit for hit in self._pending if is_current(hit))
            dropped = len(self._pending) - len(current)
            self._pending = current
        self._metrics.unverified.inc(dropped)

    def _take(self) -> list[Hit]:
        taken: list[Hit] = []
        tokens_left = _BATCH_TOKENS
        with self._pending_lock:
            while self._pending and len(taken) < _BATCH_SEQUENCES:
                tokens_left -= len(self._pending[0].request.ids)
                if taken and tokens_left < 0:
                    break
                taken.append(self._pending.popleft())
        return taken
