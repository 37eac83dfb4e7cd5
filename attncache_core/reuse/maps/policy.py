"""Decide which texts may reuse attention maps, and from which records.

A policy has a budget, a limit of strangeness and a policy for each length group. A text
that is stranger than the limit reuses nothing. For any other text, the search finds the nearest record of
each kind, and the policy of the length group decides whether one of these records serves.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property

import numpy as np

from attncache_core import native
from attncache_core.heads.comparator import Measure
from attncache_core.native.search import NativePolicy
from attncache_core.reuse.maps.info import GroupInfo, PolicyInfo
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.runtime.stored import Stored

# The floor of a budget is a bound on the 1st percentile.
FLOOR_SHARE = 0.01


@dataclass(frozen=True)
class Budget(Stored):
    """The quality that hits must keep: a mean over all hits and, for cosine, a floor for nearly all hits."""

    measure: Measure
    least: float  # lower bound on the mean of the measure over hits
    floor: float = 0.0  # lower bound on the 1st percentile of the cosine over hits; 0: no floor

    def __post_init__(self) -> None:
        """Raise ValueError if a bound is outside [0, 1], or if a budget of decisions has a floor.

        Also if `measure` is neither a Measure nor the name of one.
        """
        # A name equals its measure, and is not the same object, which is what the code compares.
        object.__setattr__(self, "measure", Measure(self.measure))
        if not 0 <= self.least <= 1 or not 0 <= self.floor <= 1:
            raise ValueError("a budget lies between 0 and 1")
        if self.floor and self.measure is not Measure.COSINE:
            raise ValueError("a budget of decisions has no floor")

    @property
    def binds(self) -> bool:
        """Whether there is any quality to keep. With an operator's own thresholds there is none."""
        return self.least > 0 or self.floor > 0

    def kept_by(self, lower_bound: float, floor: float | None) -> bool:
        """Return whether these bounds keep the budget. floor: None if it is not known."""
        keeps_floor = not self.floor or (floor is not None and floor >= self.floor)
        return lower_bound >= self.least and keeps_floor

    @property
    def allowed_harm(self) -> float:
        """The share of hits that may be harmed: a cosine below the floor, or a changed decision."""
        return FLOOR_SHARE if self.measure is Measure.COSINE else 1 - self.least

    def harmed(self, fidelity: np.ndarray) -> np.ndarray:
        """Return which hits of this fidelity [n] are harmed, bool [n]. A fidelity of nan counts as harmed."""
        if self.measure is Measure.COSINE:
            return ~(fidelity >= self.floor)
        return ~(fidelity >= 1)


def shown_below(value: float, least: float) -> str:
    """Return a value with four decimals, or with as many as show that it is below `least`, if it is."""
    decimals = next((count for count in range(4, 17) if float(f"{value:.{count}f}") < least), 4)
    return f"{value:.{decimals}f}"


# A threshold that no similarity reaches. It is finite because manifests and JSON hold only finite thresholds.
_NEVER = 2.0


@dataclass(frozen=True)
class KindPolicy(Stored):
    """When records of one kind may serve: the threshold θ, and the expected damage by similarity.

    The expected damage is a curve through points. It is linear between points, and constant before the first
    point and after the last point. Without points it is 1 - similarity.
    """

    threshold: float  # θ: the least similarity of a hit; above 1: no record hits
    similarities: tuple[float, ...] = ()  # of the curve's points, ascending
    damages: tuple[float, ...] = ()  # of the curve's points, descending: mean 1 - cosine of a hit

    def __post_init__(self) -> None:
        """Raise ValueError if the points do not make a falling curve."""
        rises = list(self.similarities) == sorted(self.similarities)
        falls = list(self.damages) == sorted(self.damages, reverse=True)
        if len(self.similarities) != len(self.damages) or not (rises and falls):
            raise ValueError("a curve needs one damage, falling, for each similarity, rising")
        if not np.isfinite((*self.similarities, *self.damages)).all():
            raise ValueError("a point of a curve is not a finite number")

    def expected_damage(self, similarities: np.ndarray) -> np.ndarray:
        """Return the expected damage of hits with these similarities [n], float64 [n].

        A record of exactly the same tokens has similarity 1 and does no damage.
        """
        if not self.similarities:
            return 1.0 - similarities
        damages = np.interp(similarities, self.similarities, self.damages)
        return np.where(similarities >= 1.0, 0.0, damages)


@dataclass(frozen=True)
class LengthGroup(Stored):
    """The policy of the sequences with more tokens than the previous group's maximum, up to `longest`."""

    longest: int  # tokens
    kinds: dict[RecordKind, KindPolicy]
    # If False, sequences are not compared with records. The mean of each length serves every sequence, unless
    # the θ of the mean is above 1; a recorded sequence is recognised by its tokens and takes its own record.
    # The first step of tightening starts the search.
    searched: bool = True
    tightened: int = 0  # steps since the calibration

    def with_threshold(self, threshold: float) -> LengthGroup:
        """Return the group with a search and one θ for all kinds."""
        kinds = {kind: replace(policy, threshold=threshold) for kind, policy in self.kinds.items()}
        return replace(self, kinds=kinds, searched=True)

    def recorded_only(self) -> LengthGroup:
        """Return the group without a search and without means, so that only recorded sequences hit."""
        never = replace(self.kinds[RecordKind.MEAN], threshold=_NEVER)
        return replace(self, searched=False, kinds={**self.kinds, RecordKind.MEAN: never})

    @property
    def mean_serves(self) -> bool:
        """Whether the mean of a length serves sequences of a group that is not searched."""
        return self.kinds[RecordKind.MEAN].threshold <= 1

    def one_step_tighter(self) -> LengthGroup:
        """Return the group with every θ half as far from 1; from the sixth step on, no record reaches θ.

        If the group was not searched, the first step starts the search too: lengths above the calibrated ones
        are searched before. If only recorded sequences could hit, the first step switches the group off.
        """
        if not self.searched and not self.mean_serves:
            return replace(self.with_threshold(_NEVER), tightened=self.tightened + 1)
        kinds = {
            kind: replace(policy, threshold=1 - (1 - policy.threshold) * KEPT_SHARE)
            for kind, policy in self.kinds.items()
        }
        tighter = replace(self, kinds=kinds, searched=True, tightened=self.tightened + 1)
        return tighter if tighter.tightened < MAX_STEPS else tighter.with_threshold(_NEVER)

    def choose(self, similarities: Mapping[RecordKind, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Choose the kind of record that serves each sequence, and decide whether the record serves.

        similarities: of the nearest record of each kind, [n]; -inf if there is no record. Returns (kinds
        int64 [n], served bool [n]). Chooses the kind with the least expected damage among the kinds that
        reach their θ, or among all kinds if none does.
        """
        kinds = list(similarities)
        values = np.array([similarities[kind] for kind in kinds])
        damages = np.array([self.kinds[kind].expected_damage(similarities[kind]) for kind in kinds])
        damages[np.isneginf(values)] = np.inf
        thresholds = np.array([[self.kinds[kind].threshold] for kind in kinds])
        reached = values >= thresholds
        served = reached.any(axis=0)
        # If any kind reaches its θ, the kinds that do not are excluded.
        chosen = np.where(reached | ~served, damages, np.inf).argmin(axis=0)
        return np.array(kinds, dtype=np.int64)[chosen], np.asarray(served)

    @property
    def approximates(self) -> bool:
        """Whether records of other sequences may serve a sequence."""
        if not self.searched:
            return self.mean_serves
        return any(policy.threshold < 1 for policy in self.kinds.values())

    @property
    def is_off(self) -> bool:
        """Whether nothing can hit, not even a recorded sequence."""
        return self.searched and all(policy.threshold > 1 for policy in self.kinds.values())


# One step halves 1 - θ of a length group, or the distance of the limit from the usual strangeness.
KEPT_SHARE = 0.5
MAX_STEPS = 6  # from this step on, nothing hits any more


@dataclass(frozen=True)
class Steps(Stored):
    """How often each part of a policy was tightened since its calibration."""

    groups: tuple[int, ...]  # steps of each length group
    limit: int  # steps of the limit of strangeness

    def __post_init__(self) -> None:
        """Raise ValueError if a number of steps is negative."""
        if min((*self.groups, self.limit)) < 0:
            raise ValueError("a policy cannot be loosened: a number of steps is negative")

    def tighter(self, other: Steps) -> Steps:
        """Return the larger number of steps for each group and for the limit.

        Both must have the same number of groups.
        """
        return Steps(tuple(map(max, self.groups, other.groups)), max(self.limit, other.limit))


@dataclass(frozen=True)
class StrangenessLimit(Stored):
    """The strangeness above which a text reuses nothing; familiarity.py defines strangeness."""

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
        if tightened >= MAX_STEPS:
            return replace(self, strangest=-1.0, tightened=tightened)
        strangest = self.usual + (self.strangest - self.usual) * KEPT_SHARE
        return replace(self, strangest=min(self.strangest, strangest), tightened=tightened)


@dataclass(frozen=True)
class ReusePolicy(Stored):
    """A budget, and the thresholds that calibration found to keep the budget."""

    budget: Budget
    groups: tuple[LengthGroup, ...]  # ascending by `longest`; the last group also takes all longer sequences
    limit: StrangenessLimit | None = None  # None: an operator chose θ, and any text may hit

    def __post_init__(self) -> None:
        """Raise ValueError if there is no length group, or if the groups are not in ascending order."""
        longest = [group.longest for group in self.groups]
        if not longest or longest != sorted(set(longest)):
            raise ValueError("length groups must rise")

    @cached_property
    def _bounds(self) -> list[int]:
        return [group.longest for group in self.groups[:-1]]

    @cached_property
    def compiled(self) -> NativePolicy | None:
        """`LengthGroup.choose` of all length groups by compiled code; None without the code."""
        kernel = native.kernel()
        if kernel is None:
            return None
        curves = [[astuple(group.kinds[kind]) for kind in RecordKind] for group in self.groups]
        return NativePolicy(kernel.library, self._bounds, curves)

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
        return PolicyInfo(asdict(self.budget), asdict(self.limit) if self.limit else None, groups)

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
        return replace(self, groups=tuple(group.with_threshold(_NEVER) for group in self.groups))


# An upper bound on every sequence length.
_ANY_LENGTH = 10**9


def uniform_policy(budget: Budget, threshold: float) -> ReusePolicy:
    """Return the policy before calibration: one group for all lengths, one θ for all kinds, no curves."""
    kinds = {kind: KindPolicy(threshold) for kind in RecordKind}
    return ReusePolicy(budget, (LengthGroup(longest=_ANY_LENGTH, kinds=kinds),))
