"""Whether hits keep the budget while a server runs: windows over verified hits.

A verified hit has been computed a second time, in full; its fidelity says how near the two results are.
Hits count together if they are of one length group and one band: many good hits of usual texts do not hide
some bad ones of unusual texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict
from scipy import stats

from attncache_core.attention_maps.policy import Budget, ReusePolicy, Steps

WINDOW_HITS = 200  # the last verified hits that count
_LEAST_FOR_A_MEAN = 50  # below it a mean says little
# One harmed hit among the first five is a share above 1 % too, but may be the one in a hundred.
_LEAST_HARMED = 2
_CONFIDENCE = 0.95


class Band(StrEnum):
    """How familiar a text was that hit."""

    USUAL = "usual"  # at most as strange as the median of the texts that were calibrated on
    UNUSUAL = "unusual"  # stranger than that


@dataclass(frozen=True)
class Window:
    """Which verified hits count together: those that one state of the policy let hit."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    place: int  # number of the length group
    band: Band
    steps: int = 0  # times that the length group was tightened
    limit_steps: int = 0  # times that the limit of strangeness was, which decides about unusual texts only

    def is_outdated(self, now: Window) -> bool:
        """Whether a looser policy let these hits pass. now: the window of the same group and band."""
        return self.steps < now.steps or self.limit_steps < now.limit_steps


def windows_of(steps: Steps) -> list[Window]:
    """Return the windows of a policy that was tightened so often, two for each length group."""
    return [
        Window(place, band, taken, steps.limit if band is Band.UNUSUAL else 0)
        for place, taken in enumerate(steps.groups)
        for band in Band
    ]


def window_of(policy: ReusePolicy, length: int, strangeness: float) -> Window:
    """Return the window of a hit of so many tokens. strangeness: nan where nobody asked for it."""
    unusual = policy.limit is not None and strangeness > policy.limit.usual
    return windows_of(policy.steps)[len(Band) * policy.place_of(length) + unusual]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Verified hits of one window do not keep the budget."""

    hits: int
    mean: float  # of the measure
    harmed: int  # hits that are harmed, as Budget.harmed says

    def reason(self, budget: Budget) -> str:
        """Say for people what of the budget is not kept."""
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
    """Return in what hits of these fidelities, in any order, fail the budget; None where they keep it.

    They fail if the mean of at least 50 is too low or, with 95 % confidence (Clopper and Pearson 1934), more
    hits are below the budget's floor than it allows; two at the least. What is no number (nan) counts as too
    low and as harmed. A budget that does not bind is always kept.
    """
    if not budget.binds:
        return None
    hits, mean = len(fidelities), fmean(fidelities)
    harmed = int(budget.harmed(np.array(fidelities)).sum())
    fails = _mean_fails(hits, mean, budget) or _floor_fails(hits, harmed, budget)
    return Shortfall(hits, mean, harmed) if fails else None


def _mean_fails(hits: int, mean: float, budget: Budget) -> bool:
    return hits >= _LEAST_FOR_A_MEAN and not mean >= budget.least


def _floor_fails(hits: int, harmed: int, budget: Budget) -> bool:
    # Decisions have no floor: the mean of agreement is the share of hits that are not harmed.
    if not budget.floor or harmed < _LEAST_HARMED:
        return False
    share = float(stats.beta.ppf(1 - _CONFIDENCE, harmed, hits - harmed + 1))
    return share > budget.allowed_harm


class VerifiedHits:
    """What was measured of the last verified hits of each window, against one budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._all: dict[Window, deque[float]] = {}
        self._new: dict[Window, deque[float]] = {}

    @property
    def new(self) -> Mapping[Window, Sequence[float]]:
        """Fidelities of each window since `take_over`, oldest first."""
        return self._new

    def take_over(self, windows: Mapping[Window, Sequence[float]]) -> None:
        """Go on from what all servers verified, this one included; what is not in there is forgotten."""
        self._all = {window: deque(values, maxlen=WINDOW_HITS) for window, values in windows.items()}
        self._new = {}

    def note(self, window: Window, fidelities: Iterable[float]) -> Shortfall | None:
        """Add verified hits of a window, oldest first; a Shortfall if the window's hits fail the budget now.

        After a Shortfall the window is empty: the caller tightens the policy, and what the window held was
        chosen by the looser one.
        """
        # Rounding can take a cosine beyond 1.
        added = np.clip(list(fidelities), -1.0, 1.0).tolist()
        for windows in (self._all, self._new):
            windows.setdefault(window, deque(maxlen=WINDOW_HITS)).extend(added)
        shortfall = find_shortfall(self._all[window], self._budget) if self._all[window] else None
        if shortfall:
            del self._all[window], self._new[window]
        return shortfall
