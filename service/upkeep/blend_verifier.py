"""Verify blended answers while serving: compute some again exactly, and tighten the gate if they fail the
budget.

a batch's blended sequences -> offer -> a share of them, pending -> verify_some -> fidelity to the exact
output
    -> they fail the budget: more is computed again from now on; after the last step, everything
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from attncache_core import PrefillEngine, PrefillRequest, PrefillResult
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.blend.gate import BlendGate
from attncache_core.reuse.maps.verification import Band, Shortfall, VerifiedHits, Window
from service.observability.metrics import Metrics
from service.upkeep.verifying import LaterVerifier

logger = logging.getLogger(__name__)


class _Blended(NamedTuple):
    """A blended sequence to be verified."""

    request: PrefillRequest
    output: np.ndarray  # float32 [dimensions], the output that the client got
    steps: int  # of the gate that blended it


class BlendVerifier(LaterVerifier[_Blended]):
    """Verifies sequences whose chunks were blended, and owns what was found."""

    def __init__(
        self, engine: PrefillEngine, rate: float, metrics: Metrics, chance: random.Random | None = None
    ) -> None:
        """engine: that blends. rate: share of blended sequences to verify. chance: picks them; None: at
        random.

        Raises NoClassifier if the budget is about decisions and there are no decisions.
        """
        super().__init__(metrics)
        self._engine, self._blending = engine, engine.blending
        self._rate, self._chance = rate, chance or random.Random()
        self._budget = self.policy.budget
        self._cosine, self._comparator = (
            engine.blending.comparator(measure, self.policy.listwise)
            for measure in (Measure.COSINE, self._budget.measure)
        )
        self._verified = VerifiedHits(self._budget)

    @property
    def policy(self) -> BlendGate:
        """The gate of the engine."""
        assert self._blending.gate is not None
        return self._blending.gate

    def offer(self, requests: Sequence[PrefillRequest], result: PrefillResult, policy: BlendGate) -> None:
        """See LaterVerifier."""
        chosen = [
            _Blended(request, result.outputs[index].copy(), policy.steps)
            for index, (request, report) in enumerate(zip(requests, result.blends or (), strict=False))
            if report is not None and result.finite[index] and self._chance.random() < self._rate
        ]
        self._add(chosen)

    def close(self) -> None:
        """See LaterVerifier. A tightened gate was kept at once, and other findings are not kept."""

    def _verify(self, hits: list[_Blended]) -> None:
        # What is stored exactly may be used, and shortens the pass.
        full = self._engine.run([replace(hit.request, blend=None) for hit in hits])
        blended = np.stack([hit.output for hit in hits])
        cosines, fidelities = (
            np.where(full.finite, comparator.fidelity(blended, full.outputs), 0.0)
            for comparator in (self._cosine, self._comparator)
        )
        self._metrics.observe_verified(cosines)
        gate = self.policy
        current = [own for hit, own in zip(hits, fidelities.tolist(), strict=True) if hit.steps == gate.steps]
        window = Window(0, Band.USUAL, gate.steps)
        if current and (shortfall := self._verified.add(window, current)):
            self._tighten(gate, shortfall)
            # Counted last, so that whoever sees the count finds the gate tightened and kept.
            self._metrics.observe_budget_failure()

    def _tighten(self, gate: BlendGate, shortfall: Shortfall) -> None:
        now = self._blending.tighten(gate)
        consequence = (
            "chunks are computed exactly from now on"
            if now.ratio is None
            else f"{now.ratio:.0%} of the reused tokens are computed again from now on"
        )
        logger.warning("blended chunks: %s; %s", shortfall.reason(self._budget), consequence)
        self._keep_pending(lambda hit: hit.steps == now.steps)
