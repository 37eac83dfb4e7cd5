"""Verification while serving: some hits are computed again in full, to see whether hits keep the budget.

    a batch's hits -> offer -> a share of them, pending -> verify_some -> cosine to the full model's output
                                                                       -> is a length group's mean too low,
                                                                          its thresholds are tightened

The batcher says when: once answers have been sent and nobody waits for the engine, a few sequences at a
time; if too many are pending, a few after each batch. Labels are no hits, so none is ever verified.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from attncache_core import PrefillEngine, PrefillResult
from attncache_core.attention_maps.policy import ReusePolicy
from attncache_core.attention_maps.verification import Shortfall, VerifiedHits
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


class _Hit(NamedTuple):
    """A hit that is to be verified. Token ids are a user's text: they live no longer than this."""

    ids: Sequence[int]
    reading: Reading
    output: np.ndarray  # float32 [dimensions], what the client got


class Verifier:
    """Owns the hits that are to be verified, and what was found out about each length group.

    All of it belongs to the thread that runs the engine; `stop`, `has_work` and `is_overdue` are for any.
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

        Raises NoClassifier if the budget is of decisions and nobody takes any; see PrefillEngine.judge.
        """
        self._engine = engine
        self._rate = rate
        self._metrics = metrics
        self._chance = chance or random.Random()
        self._budget = policy.budget
        self._cosine = engine.judge(Measure.COSINE)
        self._judge = engine.judge(policy.budget.measure)
        self._places_of = policy.places_of
        self._names = policy.names()
        self._verified = VerifiedHits(len(policy.groups), policy.budget.least)
        self._pending: deque[_Hit] = deque()
        self._stopped = False

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

    def offer(
        self, sequences: Sequence[Sequence[int]], readings: Sequence[Reading], result: PrefillResult
    ) -> None:
        """Choose among the hits of a batch, whose answers are on their way; beyond a bound the oldest go."""
        batch = zip(sequences, readings, result.outcomes, result.outputs, strict=True)
        for ids, reading, outcome, output in batch:
            if outcome.is_hit and self._chance.random() < self._rate:
                # A copy: a view would keep the outputs of the whole batch.
                self._pending.append(_Hit(ids, reading, output.copy()))
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
        full = self._engine.run(sequences, [False] * len(hits), readings).outputs
        with_reuse = np.stack([hit.output for hit in hits])
        self._metrics.observe_verified(self._cosine.fidelity(with_reuse, full))
        fidelities = self._judge.fidelity(with_reuse, full)
        places = self._places(hits)
        for place in np.unique(places).tolist():
            if shortfall := self._verified.note(place, fidelities[places == place].tolist()):
                self._tighten(place, shortfall)

    def _tighten(self, place: int, shortfall: Shortfall) -> None:
        self._engine.tighten(place)
        self._forget(place)
        logger.warning(
            "sequences of %s tokens: mean %s %.4f of the last %d verified hits is below the budget %.4f; %s",
            self._names[place],
            self._budget.measure.value,
            shortfall.mean,
            shortfall.hits,
            self._budget.least,
            self._what_holds_now(place),
        )
        # Last: who sees it counted finds all the rest done.
        self._metrics.observe_budget_failure()

    def _forget(self, place: int) -> None:
        """Leave out what is pending of a group: it was chosen by thresholds that no longer hold."""
        places = self._places(self._pending)
        self._pending = deque(hit for hit, own in zip(self._pending, places, strict=True) if own != place)
        self._metrics.observe_unverified(int((places == place).sum()))

    def _places(self, hits: Iterable[_Hit]) -> np.ndarray:
        """The number of each hit's length group, int64 [n]."""
        return self._places_of(np.array([len(hit.ids) for hit in hits]))

    def _what_holds_now(self, place: int) -> str:
        policy = self._engine.policy
        assert policy is not None  # it has just been tightened
        group = policy.groups[place]
        if group.is_off:
            return "they reuse nothing from now on"
        thresholds = (f"{kind.name.lower()} {rule.threshold:.4f}" for kind, rule in group.kinds.items())
        return f"thresholds are now {', '.join(thresholds)}"
