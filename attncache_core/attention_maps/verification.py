"""Whether hits keep the budget while a server runs: a window over the verified hits of each length group.

A verified hit has been computed a second time, in full; its fidelity says how near the two results are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

_WINDOW = 200  # verified hits of a length group
_LEAST_FOR_A_MEAN = 50  # below it a mean says little


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A length group was found below the budget."""

    mean: float  # of the measure, below the budget's least
    hits: int  # verified ones it is the mean of


class VerifiedHits:
    """What was measured of the last verified hits of each length group, against one budget."""

    def __init__(self, groups: int, least: float) -> None:
        """`groups`: how many length groups there are; `least`: the mean that their hits must keep."""
        self._least = least
        self._windows: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in range(groups)]

    def note(self, place: int, fidelities: Iterable[float]) -> Shortfall | None:
        """Add verified hits of group number `place`, oldest first; a Shortfall if its mean is now too low.

        No number (nan) counts as too low. After a Shortfall the group's window starts anew: the caller
        tightens the thresholds, and what the window held was chosen by the old ones.
        """
        window = self._windows[place]
        window.extend(fidelities)
        if len(window) < _LEAST_FOR_A_MEAN:
            return None
        mean = fmean(window)
        if mean >= self._least:
            return None
        shortfall = Shortfall(mean, len(window))
        window.clear()
        return shortfall
