"""The papers' thresholds."""

from __future__ import annotations

from enum import StrEnum


class Preset(StrEnum):
    """The papers' thresholds. They keep no budget; 0.99 is a predicted mean map distance of 0.05."""

    CONSERVATIVE = "conservative"
    MODERATE = "moderate"
    AGGRESSIVE = "aggressive"

    @property
    def threshold(self) -> float:
        """The threshold θ of the preset."""
        return {"conservative": 0.995, "moderate": 0.99, "aggressive": 0.95}[self]
