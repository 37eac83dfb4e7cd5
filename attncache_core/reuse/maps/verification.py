"""Decide whether hits keep the quality budget while a server runs, from windows of verified hits.

A verified hit was computed a second time, in full. Its fidelity is the measure of the two outputs. A window
holds the last verified hits of one length group and one band of strangeness, so many good hits of usual texts
cannot hide a few bad hits of unusual texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

import numpy as np
import scipy

from attncache_core.reuse.maps.policy import Budget, ReusePolicy, Steps
from attncache_core.runtime.stored import Stored

WINDOW_HITS = 200  # number of verified hits in a full window
_MIN_FOR_A_MEAN = 50  # hits; the mean of fewer hits says little
# The budget allows one harmed hit in a hundred, and this hit may be among the first five hits of a window.
_MIN_HARMED = 2
_CONFIDENCE = 0.95


class Band(StrEnum):
    """The strangeness of a text that hit, compared with the calibration texts."""

    USUAL = "usual"  # at most the median strangeness of the calibration texts
    UNUSUAL = "unusual"  # above the median


@dataclass(frozen=True)
class Window(Stored):
    """The verified hits that count together: hits of one group and band under one state of the policy."""

    place: int  # index of the length group; the field's name is part of the format of tightened.json
    band: Band
    steps: int = 0  # steps of the length group
    limit_steps: int = 0  # steps of the limit of strangeness, which affects unusual texts only

    def is_outdated(self, now: Window) -> bool:
        """Return whether a looser policy let these hits hit. now: the group and band's current window."""
        return self.steps < now.steps or self.limit_steps < now.limit_steps


def windows_of(steps: Steps) -> list[Window]:
    """Return the windows of a policy with these steps, two for each length group."""
    return [
        Window(index, band, taken, steps.limit if band is Band.UNUSUAL else 0)
        for index, taken in enumerate(steps.groups)
        for band in Band
    ]


def window_of(policy: ReusePolicy, length: int, strangeness: float) -> Window:
    """Return the window of a hit of `length` tokens. strangeness: nan if it was not computed."""
    unusual = policy.limit is not None and strangeness > policy.limit.usual
    return windows_of(policy.steps)[len(Band) * policy.group_index(length) + unusual]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The figures of a window that does not keep the budget."""

    hits: int
    mean: float  # mean of the measure over the hits
    harmed: int  # number of harmed hits; see Budget.harmed

    def reason(self, budget: Budget) -> str:
        """Return which part of the budget is not kept, for people."""
        if _mean_fails(self.hits, self.mean, budget):
            return (
                f"mean {budget.measure.value} {self.mean:.4f} of the last {self.hits} verified hits is below "
                f"the budget {budget.least:.4f}"
            )
        return (
            f"{self.harmed} of the last {self.hits} verified hits are below {budget.measure.value} "
            f"{budget.floor:.4f}, and the budget allows {budget.allowed_harm:.0%}"
        )


def find_shortfall(fidelities: Sequence[float], budget: Budget) -> Shortfall | None:
    """Return the Shortfall of hits with these fidelities, in any order; None if the hits keep the budget.

    Hits fail the budget if there are at least 50 hits and the mean is too low. They also fail if at least two
    hits are below the floor and, with 95 % confidence (Clopper and Pearson 1934), the share of hits below the
    floor is larger than the budget allows. A fidelity of nan counts as too low and as harmed. A budget that
    does not bind is always kept.
    """
    if not budget.binds:
        return None
    hits, mean = len(fidelities), fmean(fidelities)
    harmed = int(budget.harmed(np.array(fidelities)).sum())
    fails = _mean_fails(hits, mean, budget) or _floor_fails(hits, harmed, budget)
    return Shortfall(hits, mean, harmed) if fails else None


def _mean_fails(hits: int, mean: float, budget: Budget) -> bool:
    return hits >= _MIN_FOR_A_MEAN and not mean >= budget.least


def _floor_fails(hits: int, harmed: int, budget: Budget) -> bool:
    # A budget of decisions has no floor: the mean of agreement already is the share of unharmed hits.
    if not budget.floor or harmed < _MIN_HARMED:
        return False
    share = float(scipy.special.betaincinv(harmed, hits - harmed + 1, 1 - _CONFIDENCE))
    return share > budget.allowed_harm


class VerifiedHits:
    """The fidelities of the last verified hits of each window, tested against one budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._all: dict[Window, deque[float]] = {}
        # The fidelities of each window that were added since `restart_from`, oldest first.
        self.new: dict[Window, deque[float]] = {}

    def restart_from(self, windows: Mapping[Window, Sequence[float]]) -> None:
        """Replace all fidelities by the fidelities that all servers found, including this one."""
        self._all = {window: deque(values, maxlen=WINDOW_HITS) for window, values in windows.items()}
        self.new = {}

    def add(self, window: Window, fidelities: Iterable[float]) -> Shortfall | None:
        """Add verified hits to a window, oldest first. Returns a Shortfall if the window fails the budget.

        A Shortfall empties the window, because the caller then tightens the policy, and the hits in the
        window were let hit by the looser policy.
        """
        # Rounding can make a cosine larger than 1.
        added = np.clip(list(fidelities), -1.0, 1.0).tolist()
        for windows in (self._all, self.new):
            windows.setdefault(window, deque(maxlen=WINDOW_HITS)).extend(added)
        shortfall = find_shortfall(self._all[window], self._budget) if self._all[window] else None
        if shortfall:
            del self._all[window], self.new[window]
        return shortfall
