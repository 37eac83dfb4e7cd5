"""Decide whether hits keep the quality budget while a server runs, from windows of verified hits.

A verified hit was computed a second time, in full. Its fidelity is the measure of the two outputs. A window
holds the last verified hits of one length group and one band of strangeness, so many good hits of usual texts
cannot hide a few bad hits of unusual texts.

A window is judged again and again while a server runs, so a test that errs once in twenty looks would fail
every policy sooner or later. The judgement is a Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo 2023).
At each hit, somebody begins to bet with a capital of 1, and bets a part of it on this hit and each later one:
that the hit loses more than the budget allows. If hits lose just what the budget allows, the bets are fair:
no capital grows on average, and the sum of all capitals grows by 1 per hit. So at least `_EVIDENCE` hits pass
on average until the sum reaches `_EVIDENCE` by chance. If hits lose more, capitals grow exponentially, also
those of bets that began after the hits became worse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from attncache_core.reuse.maps.policy import Budget, ReusePolicy, Steps, shown_below
from attncache_core.runtime.stored import Stored

WINDOW_HITS = 1000  # number of verified hits in a full window
# The sum of capitals at which a budget counts as failed. It is above their number, so that one has grown.
_EVIDENCE = 2.0 * WINDOW_HITS
# The part of a capital that a hit without loss costs. Large parts find large losses sooner.
_BETS = np.array([[0.01], [0.04], [0.16]])
_DECIMALS = 6  # of a fidelity that is kept
_ROUNDING = 1e-6  # by which the cosine of equal outputs may differ from 1


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
    """The last hits of a window, which do not keep the budget."""

    hits: int
    mean: float  # mean of the measure over the hits
    harmed: int  # number of harmed hits; see Budget.harmed
    mean_is_low: bool  # otherwise, too many hits are below the floor

    def reason(self, budget: Budget) -> str:
        """Return which part of the budget is not kept, for people."""
        if self.mean_is_low:
            return (
                f"mean {budget.measure.value} {shown_below(self.mean, budget.least)} of the last {self.hits} "
                f"verified hits is below the budget {budget.least}"
            )
        return (
            f"{self.harmed} of the last {self.hits} verified hits are below {budget.measure.value} "
            f"{budget.floor:.4f}, and the budget allows {budget.allowed_harm:.0%}"
        )


def find_shortfall(fidelities: Sequence[float], budget: Budget) -> Shortfall | None:
    """Return the Shortfall of hits with these fidelities, oldest first; None if nothing shows one.

    Hits fail the budget if their mean is too low, or if the share of hits below the floor is larger than the
    budget allows. A fidelity of nan counts as -1 and as harmed. A budget that does not bind is always kept.
    """
    found = np.array(fidelities)
    harmed, lowest = budget.harmed(found), np.nan_to_num(found, nan=-1.0)
    failing = _failing(1 - lowest, 1 - budget.least) if budget.least else 0
    mean_is_low = bool(failing)
    # A budget of decisions has no floor: the mean of agreement already is the share of unharmed hits.
    if not failing and budget.floor:
        failing = _failing(harmed, budget.allowed_harm)
    if not failing:
        return None
    return Shortfall(failing, float(lowest[-failing:].mean()), int(harmed[-failing:].sum()), mean_is_low)


def _failing(losses: np.ndarray, allowed: float) -> int:
    """Return how many of the last hits show that hits lose more than allowed; 0 if nothing shows it.

    losses: of hits, [n], oldest first, at least 0. allowed: their mean. The mean loss of the hits that are
    returned is larger.
    """
    growth = 1 + _BETS * (losses[::-1] / max(allowed, _ROUNDING) - 1)
    with np.errstate(over="ignore"):
        # Of each bet that began with the last hit, with the last two, and so on.
        capitals = growth.cumprod(axis=1).mean(axis=0)
    return int(capitals.argmax()) + 1 if capitals.sum() >= _EVIDENCE else 0


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
        # With few decimals, because all fidelities are written to a file again and again.
        added = np.round(np.nan_to_num(list(fidelities), nan=-1.0), _DECIMALS).clip(-1, 1).tolist()
        for windows in (self._all, self.new):
            windows.setdefault(window, deque(maxlen=WINDOW_HITS)).extend(added)
        shortfall = find_shortfall(self._all[window], self._budget) if self._all[window] else None
        if shortfall:
            del self._all[window], self.new[window]
        return shortfall
