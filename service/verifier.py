"""Verification while serving: some hits are computed again in full, to see whether hits keep the budget.

    a batch's hits -> offer -> a share of them, pending -> verify_some -> fidelity to the full model's output
        -> usual texts of a length group fail the budget:   its thresholds are tightened
        -> unusual texts of a length group fail the budget: the limit of strangeness is tightened

The batcher says when: once answers have been sent and nobody waits for the engine, a few sequences at a
time; if too many are pending, a few after each batch. Labels are no hits, so none is ever verified. Neither
are recorded texts: they get their own maps, and as exact hits they would hide others that are not.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attncache_core import PrefillEngine, PrefillResult
from attncache_core.attention_maps.policy import ReusePolicy
from attncache_core.attention_maps.verification import (
    Band,
    Shortfall,
    VerifiedHits,
    Window,
    window_of,
    windows_of,
)
from attncache_core.outputs import Measure
from attncache_core.prompts import Reading
from service.errors import log_failure
from service.metrics import Metrics

logger = logging.getLogger(__name__)

# A request that comes while these are computed waits for a few milliseconds. A longer sequence goes alone.
_BATCH_SEQUENCES = 8
_BATCH_TOKENS = 128
# So many pending are verified though requests wait: an endless load must not leave hits unwatched.
_OVERDUE = 64
_MOST_PENDING = 256
# To keep what was found out takes milliseconds: a file is written and flushed. A process that is killed
# forgets fewer hits than this; a tightening is kept at once.
_KEPT_TOGETHER = 16
# At the start and at the end it may wait for other servers; while requests are served it tries again later.
_PATIENCE_SECONDS = 1.0


class _Hit(NamedTuple):
    """A hit that is to be verified. Token ids are a user's text: they live no longer than this."""

    ids: Sequence[int]
    reading: Reading
    output: np.ndarray  # float32 [dimensions], what the client got
    window: Window  # that it counts in


class Verifier:
    """Owns the hits that are to be verified, and what was found out about each window of hits.

    All of it belongs to the thread that runs the engine; `stop`, `has_work` and `is_overdue` are for any, and
    `close` is for any once that thread has ended.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        policy: ReusePolicy,
        rate: float,
        metrics: Metrics,
        chance: random.Random | None = None,
    ) -> None:
        """`policy`: the engine's, as loaded; `rate`: the share of hits to verify; `chance` picks them.

        Goes on from what other servers verified, and earlier ones. Raises NoClassifier if the budget is of
        decisions and nobody takes any; see PrefillEngine.judge.
        """
        self._engine = engine
        self._rate = rate
        self._metrics = metrics
        self._chance = chance or random.Random()
        self._budget = policy.budget
        self._cosine = engine.judge(Measure.COSINE)
        self._judge = engine.judge(policy.budget.measure)
        self._names = policy.names()
        self._verified = VerifiedHits(policy.budget)
        self._unkept = 0  # hits that were verified since the last were kept
        self._pending: deque[_Hit] = deque()
        self._stopped = False
        self._keep(_PATIENCE_SECONDS)

    @property
    def has_work(self) -> bool:
        """Whether hits are pending, and are to be verified still."""
        return bool(self._pending) and not self._stopped

    @property
    def is_overdue(self) -> bool:
        """Whether so many are pending that requests must wait for a few of them."""
        return len(self._pending) >= _OVERDUE and not self._stopped

    def stop(self) -> None:
        """Verify nothing more, so that a server which shuts down need not wait for it."""
        self._stopped = True

    def close(self) -> None:
        """Keep what is not kept yet. Waits for at most a second while another server keeps what it has."""
        if self._unkept:
            self._keep(_PATIENCE_SECONDS)

    @property
    def _policy(self) -> ReusePolicy:
        policy = self._engine.policy
        assert policy is not None  # there are hits, so there is a database
        return policy

    def offer(
        self, sequences: Sequence[Sequence[int]], readings: Sequence[Reading], result: PrefillResult
    ) -> None:
        """Choose among the hits of a batch, whose answers are on their way; beyond a bound the oldest go."""
        strangeness = np.full(len(sequences), np.nan) if result.strangeness is None else result.strangeness
        hits = [outcome.is_hit for outcome in result.outcomes]
        approximate = result.finite & hits & (result.similarities != 1)
        for place in np.flatnonzero(approximate).tolist():
            if self._chance.random() < self._rate:
                ids, reading = sequences[place], readings[place]
                window = window_of(self._policy, len(ids), float(strangeness[place]))
                # A copy: a view would keep the outputs of the whole batch.
                self._pending.append(_Hit(ids, reading, result.outputs[place].copy(), window))
        surplus = max(0, len(self._pending) - _MOST_PENDING)
        for _ in range(surplus):
            self._pending.popleft()
        self._metrics.observe_unverified(surplus)

    def verify_some(self) -> None:
        """Compute a few pending hits in full, oldest first; tighten where these show need. Raises nothing."""
        hits = self._take()
        try:
            self._verify(hits)
        # As for a batch of requests: a panic in compiled code is no Exception, and serving goes on.
        except BaseException as error:
            log_failure(logger, "verifying hits failed", error)
            self._metrics.observe_unverified(len(hits))

    def _take(self) -> list[_Hit]:
        taken: list[_Hit] = []
        tokens_left = _BATCH_TOKENS
        while self._pending and len(taken) < _BATCH_SEQUENCES:
            tokens_left -= len(self._pending[0].ids)
            if taken and tokens_left < 0:
                break
            taken.append(self._pending.popleft())
        return taken

    def _verify(self, hits: list[_Hit]) -> None:
        sequences, readings = [hit.ids for hit in hits], [hit.reading for hit in hits]
        full = self._engine.run(sequences, [False] * len(hits), readings)
        with_reuse = np.stack([hit.output for hit in hits])
        # Nothing agrees with what is not finite, be it in a token that the output does not show.
        cosines, fidelities = (
            np.where(full.finite, judge.fidelity(with_reuse, full.outputs), 0.0)
            for judge in (self._cosine, self._judge)
        )
        self._metrics.observe_verified(cosines)
        by_window: dict[Window, list[float]] = {}
        for hit, fidelity in zip(hits, fidelities.tolist(), strict=True):
            by_window.setdefault(hit.window, []).append(fidelity)
        self._unkept += len(hits)
        failures = 0
        for window, own in by_window.items():
            # Unless the window before has just tightened what let these hit.
            if window in windows_of(self._policy.steps) and (shortfall := self._verified.note(window, own)):
                self._tighten(window, shortfall)
                failures += 1
        if self._unkept >= _KEPT_TOGETHER:
            self._keep()
        # Last: who sees it counted finds all the rest done.
        for _ in range(failures):
            self._metrics.observe_budget_failure()

    def _tighten(self, window: Window, shortfall: Shortfall) -> None:
        self._engine.tighten(None if window.band is Band.UNUSUAL else window.place)
        logger.warning(
            "sequences of %s tokens, %s texts: %s; %s",
            self._names[window.place],
            window.band.value,
            shortfall.reason(self._budget),
            self._what_holds_now(window),
        )
        # At once; if another server is at it, after the next hits.
        self._unkept += _KEPT_TOGETHER

    def _keep(self, patience_seconds: float = 0.0) -> None:
        """Exchange with other servers what was found out; try again later if one of them is doing so."""
        if kept := self._engine.keep_verified(self._verified.new, patience_seconds):
            self._verified.take_over(dict(kept.windows))
            self._unkept = 0
        self._forget_outdated()

    def _forget_outdated(self) -> None:
        """Leave out pending hits that a looser policy chose than the one that holds now."""
        windows = windows_of(self._policy.steps)
        current = deque(hit for hit in self._pending if hit.window in windows)
        self._metrics.observe_unverified(len(self._pending) - len(current))
        self._pending = current

    def _what_holds_now(self, window: Window) -> str:
        policy = self._policy
        if window.band is Band.UNUSUAL and policy.limit:
            if policy.limit.is_off:
                return "only recorded texts hit from now on"
            return f"texts of a strangeness above {policy.limit.strangest:.4g} are computed in full now"
        group = policy.groups[window.place]
        if group.is_off:
            return "they reuse nothing from now on"
        thresholds = (f"{kind.name.lower()} {rule.threshold:.4f}" for kind, rule in group.kinds.items())
        return f"thresholds are now {', '.join(thresholds)}"
