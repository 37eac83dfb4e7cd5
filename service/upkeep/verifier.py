"""Verify hits while serving: compute some hits again in full, and tighten the policy if hits fail the budget.

    a batch's hits -> offer -> a share of the hits, pending -> verify_some -> fidelity to the full output
        -> usual texts of a length group fail the budget:   the thresholds of the group are tightened
        -> unusual texts of a length group fail the budget: the limit of strangeness is tightened

Labels never hit, so labels are never verified. Recorded texts are not verified either: a recorded text gets
its own maps, and such exact hits would hide hits that are not exact.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attncache_core import PrefillEngine, PrefillRequest, PrefillResult
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import ReusePolicy
from attncache_core.reuse.maps.verification import (
    Band,
    Shortfall,
    VerifiedHits,
    Window,
    window_of,
    windows_of,
)
from service.observability.metrics import Metrics
from service.upkeep.verifying import Hit, LaterVerifier

logger = logging.getLogger(__name__)

# Findings are kept together, because keeping them takes milliseconds: a file is written and flushed. A
# process that is killed loses fewer hits than this number. A tightened policy is kept at once.
_KEPT_TOGETHER = 16
# How long the verifier waits for the lock of another server at its start and at its end. While requests are
# served, the verifier does not wait and tries again later.
_PATIENCE_SECONDS = 1.0


class Verifier(LaterVerifier):
    """Verifies hits of attention maps, and owns the findings about each window of hits."""

    def __init__(
        self,
        engine: PrefillEngine,
        rate: float,
        metrics: Metrics,
        chance: random.Random | None = None,
    ) -> None:
        """engine: with a database. rate, chance: see LaterVerifier.

        Starts from the findings that this and other servers have kept with the database. Raises NoClassifier
        if the budget is about decisions and there are no decisions; see Decisions.comparator.
        """
        super().__init__(engine, rate, metrics, chance)
        assert engine.map_reuse is not None
        self._reuse = engine.map_reuse
        policy = self._reuse.policy
        self._budget = policy.budget
        self._cosine = engine.decisions.comparator(Measure.COSINE)
        self._comparator = engine.decisions.comparator(policy.budget.measure)
        self._names = policy.names()
        self._verified = VerifiedHits(policy.budget)
        self._unkept = 0  # hits verified since findings were last kept
        self._keep(_PATIENCE_SECONDS)

    def close(self) -> None:
        """Keep findings that are not kept yet. Waits at most a second for another server's lock."""
        if self._unkept:
            self._keep(_PATIENCE_SECONDS)

    def exchange(self) -> None:
        """Exchange findings with servers on other machines. Waits while hits are verified."""
        with self._verifying:
            self._keep()

    @property
    def subject(self) -> str:
        """The database and its policy as it was calibrated: other generations have others."""
        database = self._reuse.database
        return f"{database.manifest.id}/{database.search.policy.digest}"

    @property
    def policy(self) -> ReusePolicy:
        """The current policy of the engine."""
        return self._reuse.policy

    def offer(self, requests: Sequence[PrefillRequest], result: PrefillResult, policy: ReusePolicy) -> None:
        """See LaterVerifier."""
        strangeness = result.strangeness
        hits = [outcome.is_hit for outcome in result.outcomes]
        approximate = result.finite & hits & (result.similarities != 1)
        chosen: list[Hit] = []
        for index in np.flatnonzero(approximate).tolist():
            if self._chance.random() < self._rate:
                request = requests[index]
                window = window_of(policy, len(request.ids), float(strangeness[index]))
                # A copy, because a view would keep the outputs of the whole batch in memory.
                chosen.append(Hit(request, result.outputs[index].copy(), window))
        self._add(chosen)

    def steps(self) -> list[int]:
        """See LaterVerifier: the length groups, then the limit of strangeness."""
        steps = self.policy.steps
        return [*steps.groups, steps.limit]

    def _follow(self, steps: list[int]) -> None:
        for place, count in enumerate(steps[:-1]):
            while self.policy.groups[place].tightened < count and not self.policy.groups[place].is_off:
                self._reuse.tighten(place)
        while (limit := self.policy.limit) and limit.tightened < steps[-1] and not limit.is_off:
            self._reuse.tighten(None)
        self._keep()

    def _verify(self, hits: list[Hit]) -> None:
        full = self._engine.run([replace(hit.request, reuse=False) for hit in hits])
        with_reuse = np.stack([hit.output for hit in hits])
        # An output that is not finite agrees with nothing, even if the NaN is in a token outside the output.
        cosines, fidelities = (
            np.where(full.finite, comparator.fidelity(with_reuse, full.outputs), 0.0)
            for comparator in (self._cosine, self._comparator)
        )
        self._metrics.observe_verified(cosines)
        by_window: dict[Window, list[float]] = {}
        for hit, fidelity in zip(hits, fidelities.tolist(), strict=True):
            by_window.setdefault(hit.window, []).append(fidelity)
        self._unkept += len(hits)
        failures = 0
        for window, of_window in by_window.items():
            # A window is outdated if an earlier window of this loop has just tightened the policy.
            if window in windows_of(self.policy.steps) and (
                shortfall := self._verified.add(window, of_window)
            ):
                self._tighten(window, shortfall)
                failures += 1
        if self._unkept >= _KEPT_TOGETHER:
            self._keep()
        # Counted last, so that whoever sees the count finds the policy tightened and kept.
        self._metrics.budget_failures.inc(failures)

    def _tighten(self, window: Window, shortfall: Shortfall) -> None:
        self._reuse.tighten(None if window.band is Band.UNUSUAL else window.place)
        logger.warning(
            "sequences of %s tokens, %s texts: %s; %s",
            self._names[window.place],
            window.band.value,
            shortfall.reason(self._budget),
            self._consequence(window),
        )
        # Makes `_verify` keep the findings at once or, if another server holds the lock, after the next hits.
        self._unkept += _KEPT_TOGETHER

    def _keep(self, patience_seconds: float = 0.0) -> None:
        """Exchange findings with other servers; if another server holds the lock, try again later."""
        if kept := self._reuse.keep_verified(self._verified.new, patience_seconds):
            self._verified.restart_from(dict(kept.windows))
            self._unkept = 0
        # Hits that a policy looser than the present one let hit say nothing about it.
        windows = windows_of(self.policy.steps)
        self._keep_pending(lambda hit: hit.window in windows)

    def _consequence(self, window: Window) -> str:
        """Say for the log what the tightened policy now allows."""
        policy = self.policy
        if window.band is Band.UNUSUAL and policy.limit:
            if policy.limit.is_off:
                return "only recorded texts hit from now on"
            return f"texts of a strangeness above {policy.limit.strangest:.4g} are computed in full now"
        group = policy.groups[window.place]
        if group.is_off:
            return "sequences of these lengths reuse nothing from now on"
        thresholds = (f"{kind.name.lower()} {rule.threshold:.4f}" for kind, rule in group.kinds.items())
        now = f"thresholds are now {', '.join(thresholds)}"
        if self._reuse.reuses(window.place):
            return now
        return f"{now}, and these lengths reuse nothing until the next start measures their gain again"
