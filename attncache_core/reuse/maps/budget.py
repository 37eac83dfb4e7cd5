"""The quality budget: how much hits may change the answers of the full model.

Calibration chooses a reuse mask and a policy that keep the budget. Verification checks while serving that
hits keep the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from attncache_core.heads.comparator import Measure

# The floor of a budget is a bound on the 1st percentile.
FLOOR_SHARE = 0.01


@dataclass(frozen=True)
class Budget:
    """The quality that hits must keep: a mean over all hits and, for cosine, a floor for nearly all hits."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    measure: Measure
    least: float  # lower bound on the mean of the measure over hits
    floor: float = 0.0  # lower bound on the 1st percentile of the cosine over hits; 0: no floor

    def __post_init__(self) -> None:
        """Raise ValueError if a bound is outside [0, 1], or if a budget of decisions has a floor."""
        if not 0 <= self.least <= 1 or not 0 <= self.floor <= 1:
            raise ValueError("a budget lies between 0 and 1")
        if self.floor and self.measure is not Measure.COSINE:
            raise ValueError("a budget of decisions has no floor")

    @property
    def binds(self) -> bool:
        """Whether there is any quality to keep. With an operator's own thresholds there is none."""
        return self.least > 0 or self.floor > 0

    @property
    def allowed_harm(self) -> float:
        """The share of hits that may be harmed: a cosine below the floor, or a changed decision."""
        return FLOOR_SHARE if self.measure is Measure.COSINE else 1 - self.least

    def harmed(self, fidelity: np.ndarray) -> np.ndarray:
        """Return which hits of this fidelity [n] are harmed, bool [n]. A fidelity of nan counts as harmed."""
        if self.measure is Measure.COSINE:
            return ~(fidelity >= self.floor)
        return ~(fidelity >= 1)
