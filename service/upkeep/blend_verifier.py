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

import numpy as np

from attncache_core import PrefillEngine, PrefillRequest, PrefillResult
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.blend.gate import BlendGate
from attncache_core.reuse.maps.verification import Band, Shortfall, VerifiedHits, Window
from service.observability.metrics import Metrics
from service.upkeep.verifying import Hit, LaterVerifier

logger = logging.getLogger(__name__)


class BlendVerifier(LaterVerifier):
    """Verifies sequences whose chunks were blended, and owns what was found."""

    def __init__(
        self, engine: PrefillEngine, rate: float, metrics: Metrics, chance: random.Random | None = None
    ) -> None:
        """engine: that blends. rate, chance: see LaterVerifier.

        Raises NoClassifier if the budget is about decisions and there are no decisions.
        """
        super().__init__(engine, rate, metrics, chance)
        self._blending = engine.blending
        self._budget = self.policy.budget
        engine.decisions.comparator(self._budget.measure, 2 if self.policy.listwise else None)
        self._verified = VerifiedHits(self._budget)

    @property
    def subject(self) -> str:
        """The gate as it was calibrated."""
        return self.policy.digest

    @property
    def policy(self) -> BlendGate:
        """The gate of the engine."""
        assert self._blending.gate is not None
        return self._blending.gate

    def offer(self, requests: Sequence[PrefillRequest], result: PrefillResult, policy: BlendGate) -> None:
        """See LaterVerifier."""
        chosen = [
            Hit(request, result.outputs[index].copy(), _window(policy))
            for index, (request, report) in enumerate(zip(requests, result.blends or (), strict=False))
            # Answers that are exact would hide others that are not. Texts that were tokenised before the gate
            # was tightened say nothing about it.
            if report
            and not report.is_exact
            and request.blend
            and request.blend.recomputation == policy.recomputation
            and result.finite[index]
            and self._chance.random() < self._rate
        ]
        self._add(chosen)

    def close(self) -> None:
        """See LaterVerifier. A tightened gate was kept at once, and other findings are not kept."""

    def steps(self) -> list[int]:
        """See LaterVerifier: of the gate."""
        return [self.policy.steps]

    def _follow(self, steps: list[int]) -> None:
        while self.policy.steps < steps[0]:
            self._blending.tighten(self.policy)
        self._keep_pending(lambda hit: hit.window == _window(self.policy))

    def _verify(self, hits: list[Hit]) -> None:
        # Nothing is stored, because what is stored exactly changes the answer to the next equal prompt.
        full = self._engine.run([replace(hit.request, blend=None, prefix_key=None) for hit in hits])
        outputs = np.where(full.finite[:, None], full.outputs, np.nan)
        self._metrics.observe_verified(np.array(self._fidelities(Measure.COSINE, hits, outputs)))
        self._blending.follow_file()
        gate = self.policy
        window = _window(gate)
        fidelities = self._fidelities(self._budget.measure, hits, outputs)
        current = [fidelity for hit, fidelity in zip(hits, fidelities, strict=True) if hit.window == window]
        if current and (shortfall := self._verified.add(window, current)):
            self._tighten(gate, shortfall)
            # Counted last, so that whoever sees the count finds the gate tightened and kept.
            self._metrics.budget_failures.inc()

    def _fidelities(self, measure: Measure, hits: list[Hit], full: np.ndarray) -> list[float]:
        """Return the measure of each hit. full: exact outputs, float32 [hits, dimensions]."""
        found = []
        for hit, output in zip(hits, full, strict=True):
            assert hit.request.blend is not None
            documents = len(hit.request.blend.chunks) if self.policy.listwise else None
            comparator = self._engine.decisions.comparator(measure, documents)
            found.append(float(comparator.fidelity(hit.output[None], output[None])[0]))
        return found

    def _tighten(self, gate: BlendGate, shortfall: Shortfall) -> None:
        now, is_kept = self._blending.tighten(gate)
        consequence = (
            "chunks are computed exactly from now on"
            if now.ratio is None
            else f"{now.ratio:.0%} of the reused tokens are computed again from now on"
        )
        logger.warning("blended chunks: %s; %s", shortfall.reason(self._budget), consequence)
        if not is_kept:
            logger.warning(
                "the file of --blend could not be changed, so other servers and later starts do not know it"
            )
        self._keep_pending(lambda hit: hit.window == _window(now))


def _window(gate: BlendGate) -> Window:
    """Return the window of what a gate lets blend: one for each of its steps."""
    return Window(0, Band.USUAL, gate.steps)
