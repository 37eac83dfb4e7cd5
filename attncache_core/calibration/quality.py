"""The quality of a way on held-out texts, and whether it keeps a budget with 95 % confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from attncache_core.calibration.thresholds import CONFIDENCE, MIN_PROBES, share_bound, upper_bounds
from attncache_core.errors import InvalidInput
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import FLOOR_SHARE, Budget
from attncache_core.runtime.stored import Stored


@dataclass(frozen=True)
class Quality(Stored):
    """How near the answers of a way are to the reference, by a measure: cosine, or agreement of decisions."""

    mean: float  # over the texts
    lower_bound: float  # of the mean, with 95 % confidence
    # The cosine that 99 of 100 texts keep, with 95 % confidence. None: too few texts, or decisions.
    floor: float | None

    @classmethod
    def of(cls, fidelity: np.ndarray, measure: Measure) -> Self:
        """Return the quality from the measure of each text, float64 [texts], of at least 20 texts."""
        fidelity = np.minimum(fidelity, 1.0)  # a cosine may be rounded up
        bound = 1 - upper_bounds(1 - fidelity, measure)[-1]
        floor = _kept_floor(fidelity) if measure is Measure.COSINE else None
        return cls(float(fidelity.mean()), float(bound), floor)

    def keeps(self, budget: Budget) -> bool:
        """Return whether the quality keeps a budget with 95 % confidence."""
        return budget.kept_by(self.lower_bound, self.floor)

    def rest_of(self, budget: Budget) -> Budget | None:
        """Return what is left of a budget for a further part; None if nothing is left.

        The losses of two parts are added, as if they changed answers in independent directions.
        """
        least = budget.least + 1 - self.mean
        floor = budget.floor + 1 - self.floor if budget.floor and self.floor is not None else budget.floor
        return replace(budget, least=least, floor=floor) if max(least, floor) < 1 else None


def _kept_floor(cosines: np.ndarray) -> float | None:
    """Return the largest value that 99 of 100 texts reach with 95 % confidence, an order statistic."""
    below = -1  # texts that may lie below the value
    while below + 1 < len(cosines) and share_bound(below + 1, len(cosines)) <= FLOOR_SHARE:
        below += 1
    return float(np.sort(cosines)[below]) if below >= 0 else None


def texts_needed(budget: Budget) -> int:
    """Return the fewest texts with which a way that changes nothing keeps the budget.

    Raises InvalidInput for an agreement of 1, which no number of texts can prove.
    """
    if budget.measure is Measure.COSINE and not budget.floor:
        return MIN_PROBES
    if budget.allowed_harm == 0:
        raise InvalidInput(
            "min_agreement 1 cannot be proven by any number of texts; choose less, such as 0.99",
            field="min_agreement",
        )
    if budget.allowed_harm == 1:
        return MIN_PROBES
    # Inverts share_bound for no harmed text: 1 - (1 - confidence)^(1 / texts).
    exact = math.log(1 - CONFIDENCE) / math.log1p(-budget.allowed_harm)
    return max(MIN_PROBES, math.ceil(exact - 1e-9))
