"""Decide which texts may reuse attention maps, and from which records.

A policy has a budget, a limit of strangeness and a policy for each length group (length_group.py). A text
that is stranger than the limit reuses nothing. For any other text, the search finds the nearest record of
each kind, and the policy of the length group decides whether one of these records serves.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from attncache_core.reuse.maps.budget import Budget
from attncache_core.reuse.maps.info import BudgetInfo, GroupInfo, PolicyInfo
from attncache_core.reuse.maps.length_group import KindPolicy, LengthGroup
from attncache_core.reuse.maps.tightening import KEPT_SHARE, MOST_STEPS, Steps
from attncache_core.reuse.storage.layout import RecordKind


@dataclass(frozen=True)
class StrangenessLimit:
    """The strangeness above which a text reuses nothing; familiarity.py defines strangeness."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    strangest: float  # strangeness of the strangest text that may hit
    usual: float  # median strangeness of the calibration texts
    tightened: int = 0  # steps since the calibration

    def __post_init__(self) -> None:
        """Raise ValueError if a strangeness is not finite."""
        if not math.isfinite(self.strangest) or not math.isfinite(self.usual):
            raise ValueError("a strangeness is not a finite number")

    @property
    def is_off(self) -> bool:
        """Whether no text passes. A strangeness is always above 0."""
        return self.strangest < 0

    def one_step_tighter(self) -> StrangenessLimit:
        """Return the limit half as far from the usual strangeness; from the sixth step on, no text passes."""
        tightened = self.tightened + 1
        if tightened >= MOST_STEPS:
            return replace(self, strangest=-1.0, tightened=tightened)
        strangest = self.usual + (self.strangest - self.usual) * KEPT_SHARE
        return replace(self, strangest=min(self.strangest, strangest), tightened=tightened)


@dataclass(frozen=True)
class ReusePolicy:
    """A budget, and the thresholds that calibration found to keep the budget."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    budget: Budget
    groups: tuple[LengthGroup, ...]  # ascending by `longest`; the last group also takes all longer sequences
    limit: StrangenessLimit | None = None  # None: an operator chose θ, and any text may hit

    def __post_init__(self) -> None:
        """Raise ValueError if there is no length group, or if the groups are not in ascending order."""
        longest = [group.longest for group in self.groups]
        if not longest or longest != sorted(set(longest)):
            raise ValueError("length groups must rise")

    @property
    def _bounds(self) -> list[int]:
        return [group.longest for group in self.groups[:-1]]

    def group_index(self, length: int) -> int:
        """Return the index of the length group of sequences of `length` tokens."""
        return bisect_left(self._bounds, length)

    def group_indices(self, lengths: np.ndarray) -> np.ndarray:
        """Return the index of the length group of each length (int64 [n]), int64 [n]."""
        return np.searchsorted(self._bounds, lengths)

    def group_of(self, length: int) -> LengthGroup:
        """Return the length group of sequences of `length` tokens."""
        return self.groups[self.group_index(length)]

    def names(self) -> list[str]:
        """Return the range of lengths of each group for people: "1-13", "14-20", ... and "21-" at the end."""
        firsts = [1, *(longest + 1 for longest in self._bounds)]
        lasts: Sequence[int | str] = [*self._bounds, ""]
        return [f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]

    @property
    def digest(self) -> str:
        """SHA-256 of the whole policy, in hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def info(self) -> PolicyInfo:
        """Return budget and thresholds, for people and /info."""
        groups = [
            GroupInfo(
                lengths=name,
                searched=group.searched,
                threshold={kind.name.lower(): of_kind.threshold for kind, of_kind in group.kinds.items()},
                tightened=group.tightened,
                reuses=not group.is_off,
            )
            for name, group in zip(self.names(), self.groups, strict=True)
        ]
        budget = BudgetInfo(self.budget.measure, self.budget.least, self.budget.floor)
        return PolicyInfo(budget, asdict(self.limit) if self.limit else None, groups)

    def with_threshold(self, threshold: float) -> ReusePolicy:
        """Return the policy with one θ for all lengths and kinds, and no budget to keep."""
        groups = tuple(group.with_threshold(threshold) for group in self.groups)
        return replace(self, groups=groups).without_budget()

    def without_budget(self) -> ReusePolicy:
        """Return the policy with no budget to keep: hits may be verified, but nothing is tightened."""
        return replace(self, budget=replace(self.budget, least=0.0, floor=0.0))

    def tightened(self, index: int | None) -> ReusePolicy:
        """Return the policy with length group `index` one step tighter; None: with the limit one tighter."""
        if index is None:
            return replace(self, limit=self.limit and self.limit.one_step_tighter())
        groups = list(self.groups)
        groups[index] = groups[index].one_step_tighter()
        return replace(self, groups=tuple(groups))

    @property
    def steps(self) -> Steps:
        """How often each part of the policy was tightened since its calibration."""
        return Steps(
            tuple(group.tightened for group in self.groups), self.limit.tightened if self.limit else 0
        )

    def tightened_to(self, steps: Steps) -> ReusePolicy:
        """Return the policy with at least this many steps. Parts that are off take no further steps."""
        policy = self
        for index, count in enumerate(steps.groups):
            while policy.groups[index].tightened < count and not policy.groups[index].is_off:
                policy = policy.tightened(index)
        while policy.limit and policy.limit.tightened < steps.limit and not policy.limit.is_off:
            policy = policy.tightened(None)
        return policy

    def switched_off(self) -> ReusePolicy:
        """Return the policy with thresholds that no record reaches, so every sequence is computed in full."""
        return replace(self, groups=tuple(group.with_threshold(math.inf) for group in self.groups))


# An upper bound on every sequence length.
_ANY_LENGTH = 10**9


def uniform_policy(budget: Budget, threshold: float) -> ReusePolicy:
    """Return the policy before calibration: one group for all lengths, one θ for all kinds, no curves."""
    kinds = {kind: KindPolicy(threshold) for kind in RecordKind}
    return ReusePolicy(budget, (LengthGroup(longest=_ANY_LENGTH, kinds=kinds),))
