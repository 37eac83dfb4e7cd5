"""When a record may serve: how strange a text may be, and for each group of lengths thresholds and curves.

A text that is stranger than the limit takes no maps but its own. For any other text the search finds the
best record of each kind. The kind's curve says what damage to expect of the record; the record with the least
damage serves, if its similarity reaches the kind's θ.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict

from attncache_core.attention_maps.store import RecordKind
from attncache_core.outputs import Measure

# What is left of 1 - θ when a length group is tightened, and how often before it is switched off.
_KEPT_WHEN_TIGHTENED = 0.5
_MOST_TIGHTENED = 6
_NEVER = 2.0
# The floor of a budget is one of the 1st percentile.
FLOOR_SHARE = 0.01
_ANY_LENGTH = 10**9


class Preset(StrEnum):
    """The papers' thresholds, whatever hit rate they give; 0.99 is a predicted mean map distance of 0.05."""

    CONSERVATIVE = "conservative"
    MODERATE = "moderate"
    AGGRESSIVE = "aggressive"

    @property
    def threshold(self) -> float:
        """θ."""
        return {"conservative": 0.995, "moderate": 0.99, "aggressive": 0.95}[self]


@dataclass(frozen=True)
class Budget:
    """The quality that hits must keep: a mean over all of them and, for cosine, a floor for nearly all."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    measure: Measure
    least: float  # of the mean of the measure over hits
    floor: float = 0.0  # of the 1st percentile of the hits' cosine; 0: none

    def __post_init__(self) -> None:
        """Raise ValueError for a quality that no hit can have, and for a floor of decisions."""
        if not 0 <= self.least <= 1 or not 0 <= self.floor <= 1:
            raise ValueError("a budget lies between 0 and 1")
        if self.floor and self.measure is not Measure.COSINE:
            raise ValueError("a budget of decisions has no floor")

    @property
    def binds(self) -> bool:
        """Whether there is any quality to keep; thresholds of an operator's own keep none."""
        return self.least > 0 or self.floor > 0

    @property
    def allowed_harm(self) -> float:
        """The share of answers that may be harmed: below the floor, or decided otherwise."""
        return FLOOR_SHARE if self.measure is Measure.COSINE else 1 - self.least

    def harmed(self, fidelity: np.ndarray) -> np.ndarray:
        """Return which hits of this fidelity [n] are harmed, bool [n]; what is no number counts as harmed."""
        if self.measure is Measure.COSINE:
            return ~(fidelity >= self.floor)
        return ~(fidelity >= 1)


@dataclass(frozen=True)
class KindPolicy:
    """When records of one kind may serve: θ, and the damage to expect of a hit by its similarity.

    The curve goes straight from point to point and on level beyond them; without points it is 1 - similarity.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    threshold: float  # θ: least similarity of a hit; above 1 for none at all
    similarities: tuple[float, ...] = ()  # rising
    damages: tuple[float, ...] = ()  # falling: 1 - cosine that a hit of this similarity has on average

    def __post_init__(self) -> None:
        """Raise ValueError for a curve that is none."""
        rises = list(self.similarities) == sorted(self.similarities)
        falls = list(self.damages) == sorted(self.damages, reverse=True)
        if len(self.similarities) != len(self.damages) or not (rises and falls):
            raise ValueError("a curve needs as many damages, falling, as similarities, rising")
        if not np.isfinite((*self.similarities, *self.damages)).all():
            raise ValueError("a curve of what is no number")

    def expected_damage(self, similarities: np.ndarray) -> np.ndarray:
        """Of hits with these similarities [n]: float64 [n]. A record of the very tokens (1) does none."""
        if not self.similarities:
            return 1.0 - similarities
        damages = np.interp(similarities, self.similarities, self.damages)
        return np.where(similarities >= 1.0, 0.0, damages)


@dataclass(frozen=True)
class LengthGroup:
    """The policy of sequences longer than the group before takes, up to `longest` tokens."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    longest: int  # tokens
    kinds: dict[RecordKind, KindPolicy]
    # Where it is off nothing is compared: the mean of each length serves whatever is asked, unless its θ is
    # above 1; recorded sequences are known by their tokens. The other thresholds are to fall back on.
    searched: bool = True
    tightened: int = 0  # times, since it was calibrated

    def with_threshold(self, threshold: float) -> LengthGroup:
        """The same with one θ for all kinds."""
        kinds = {kind: replace(policy, threshold=threshold) for kind, policy in self.kinds.items()}
        return replace(self, kinds=kinds, searched=True)

    def recorded_only(self) -> LengthGroup:
        """The same without a search, so that only recorded sequences hit."""
        never = replace(self.kinds[RecordKind.MEAN], threshold=_NEVER)
        return replace(self, searched=False, kinds={**self.kinds, RecordKind.MEAN: never})

    @property
    def mean_serves(self) -> bool:
        """Whether the mean serves, where nothing is compared."""
        return self.kinds[RecordKind.MEAN].threshold <= 1

    def one_tighter(self) -> LengthGroup:
        """The same with every θ half as far from 1; after the sixth time none is ever reached.

        Where nothing was searched, a search is the first step.
        """
        if not self.searched:
            if not self.mean_serves:
                return replace(self.with_threshold(math.inf), tightened=self.tightened + 1)
            return replace(self, searched=True, tightened=self.tightened + 1)
        kinds = {
            kind: replace(policy, threshold=1 - (1 - policy.threshold) * _KEPT_WHEN_TIGHTENED)
            for kind, policy in self.kinds.items()
        }
        tighter = replace(self, kinds=kinds, tightened=self.tightened + 1)
        return tighter if tighter.tightened < _MOST_TIGHTENED else tighter.with_threshold(math.inf)

    def choose(self, similarities: Mapping[RecordKind, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Which kind of record serves, and whether it does.

        similarities: of each kind's nearest record [n], -inf where there is none. Returns (kinds int64 [n],
        served bool [n]). Of the kinds that reach their θ the one with the least expected damage is taken;
        where none does, the one that comes nearest to serving.
        """
        kinds = list(similarities)
        values = np.array([similarities[kind] for kind in kinds])
        damages = np.array([self.kinds[kind].expected_damage(similarities[kind]) for kind in kinds])
        damages[np.isneginf(values)] = np.inf
        thresholds = np.array([[self.kinds[kind].threshold] for kind in kinds])
        reached = values >= thresholds
        served = reached.any(axis=0)
        # Where some kind serves, those that do not are out.
        chosen = np.where(reached | ~served, damages, np.inf).argmin(axis=0)
        return np.array(kinds, dtype=np.int64)[chosen], np.asarray(served)

    @property
    def approximates(self) -> bool:
        """Whether records of other sequences may serve."""
        if not self.searched:
            return self.mean_serves
        return any(policy.threshold < 1 for policy in self.kinds.values())

    @property
    def is_off(self) -> bool:
        """Whether nothing can hit, not even a recorded sequence."""
        return self.searched and all(policy.threshold > 1 for policy in self.kinds.values())


@dataclass(frozen=True)
class StrangenessLimit:
    """How strange a text may be that takes the maps of others; see familiarity.py."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    strangest: float  # strangeness of the strangest text that may hit
    usual: float  # median strangeness of the texts that it was calibrated on
    tightened: int = 0  # times, since it was calibrated

    def __post_init__(self) -> None:
        """Raise ValueError for what is no number."""
        if not math.isfinite(self.strangest) or not math.isfinite(self.usual):
            raise ValueError("a strangeness that is no number")

    @property
    def is_off(self) -> bool:
        """Whether no text passes; a strangeness is above 0."""
        return self.strangest < 0

    def one_tighter(self) -> StrangenessLimit:
        """Return the limit half as far from the usual strangeness; after the sixth time no text passes."""
        tightened = self.tightened + 1
        if tightened >= _MOST_TIGHTENED:
            return replace(self, strangest=-1.0, tightened=tightened)
        strangest = self.usual + (self.strangest - self.usual) * _KEPT_WHEN_TIGHTENED
        return replace(self, strangest=min(self.strangest, strangest), tightened=tightened)


@dataclass(frozen=True)
class Steps:
    """How often a policy was tightened since it was calibrated."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    groups: tuple[int, ...]  # by number of the length group
    limit: int  # the limit of strangeness

    def __post_init__(self) -> None:
        """Raise ValueError for a negative number of steps."""
        if min((*self.groups, self.limit)) < 0:
            raise ValueError("a policy cannot be loosened")

    def tighter(self, other: Steps) -> Steps:
        """Return for each group and for the limit the larger number of steps. Both have as many groups."""
        return Steps(tuple(map(max, self.groups, other.groups)), max(self.limit, other.limit))

    def beyond(self, start: Steps) -> Steps:
        """Return the steps where there are more than at the start, and 0 where there are not."""
        pairs = zip(self.groups, start.groups, strict=True)
        groups = tuple(taken if taken > before else 0 for taken, before in pairs)
        return Steps(groups, self.limit if self.limit > start.limit else 0)


@dataclass(frozen=True)
class ReusePolicy:
    """The budget, and what was found to keep it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    budget: Budget
    groups: tuple[LengthGroup, ...]  # `longest` rises; the last also takes what is longer
    limit: StrangenessLimit | None = None  # None: an operator chose θ, and any text may hit

    def __post_init__(self) -> None:
        """Raise ValueError if there is no group or their order is another."""
        longest = [group.longest for group in self.groups]
        if not longest or longest != sorted(set(longest)):
            raise ValueError("length groups must rise")

    @property
    def _bounds(self) -> list[int]:
        return [group.longest for group in self.groups[:-1]]

    def place_of(self, length: int) -> int:
        """Number of the group that takes sequences of `length` tokens."""
        return bisect_left(self._bounds, length)

    def places_of(self, lengths: np.ndarray) -> np.ndarray:
        """The group's number for each of these lengths, int64 [n]."""
        return np.searchsorted(self._bounds, lengths)

    def group_of(self, length: int) -> LengthGroup:
        """The group that takes sequences of `length` tokens."""
        return self.groups[self.place_of(length)]

    def names(self) -> list[str]:
        """The groups for people: "1-13", "14-20", ... and "21-" for the last."""
        firsts = [1, *(longest + 1 for longest in self._bounds)]
        lasts: Sequence[int | str] = [*self._bounds, ""]
        return [f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]

    @property
    def digest(self) -> str:
        """SHA-256 of all that the policy says, in hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def info(self) -> dict[str, Any]:
        """Budget and thresholds, for people and /info."""
        return {
            "budget": {
                "measure": self.budget.measure,
                "least": self.budget.least,
                "floor": self.budget.floor,
            },
            "strangeness": asdict(self.limit) if self.limit else None,
            "groups": [
                {
                    "lengths": name,
                    "searched": group.searched,
                    "threshold": {
                        kind.name.lower(): policy.threshold for kind, policy in group.kinds.items()
                    },
                    "tightened": group.tightened,
                }
                for name, group in zip(self.names(), self.groups, strict=True)
            ],
        }

    def with_threshold(self, threshold: float) -> ReusePolicy:
        """The same with one θ for all lengths and kinds; an operator's, or a preset's, keeps no budget."""
        groups = tuple(group.with_threshold(threshold) for group in self.groups)
        return replace(self, groups=groups).without_budget()

    def without_budget(self) -> ReusePolicy:
        """The same with nothing to keep: hits may be verified, but nothing is tightened."""
        return replace(self, budget=replace(self.budget, least=0.0, floor=0.0))

    def searched_everywhere(self) -> ReusePolicy:
        """Return the policy with a search in every group: each sequence is compared, and thresholds decide.

        Where the mean served unsearched, that is one step tighter.
        """
        groups = tuple(
            group.one_tighter() if not group.searched and group.mean_serves else replace(group, searched=True)
            for group in self.groups
        )
        return replace(self, groups=groups)

    def tightened(self, place: int | None) -> ReusePolicy:
        """Return the policy with group number `place`, or for None its limit, one step tighter."""
        if place is None:
            return replace(self, limit=self.limit and self.limit.one_tighter())
        groups = list(self.groups)
        groups[place] = groups[place].one_tighter()
        return replace(self, groups=tuple(groups))

    @property
    def steps(self) -> Steps:
        """How often the policy was tightened since it was calibrated."""
        return Steps(
            tuple(group.tightened for group in self.groups), self.limit.tightened if self.limit else 0
        )

    def tightened_to(self, steps: Steps) -> ReusePolicy:
        """Return the policy with at least so many steps. What is off stays as it is."""
        policy = self
        for place, count in enumerate(steps.groups):
            while policy.groups[place].tightened < count and not policy.groups[place].is_off:
                policy = policy.tightened(place)
        while policy.limit and policy.limit.tightened < steps.limit and not policy.limit.is_off:
            policy = policy.tightened(None)
        return policy

    def switched_off(self) -> ReusePolicy:
        """Return the policy with thresholds that no record reaches: every sequence is computed in full."""
        return replace(self, groups=tuple(group.with_threshold(math.inf) for group in self.groups))


def uniform_policy(budget: Budget, threshold: float) -> ReusePolicy:
    """One group for all lengths, one θ for all kinds, no curves: what stands before any calibration."""
    kinds = {kind: KindPolicy(threshold) for kind in RecordKind}
    return ReusePolicy(budget, (LengthGroup(longest=_ANY_LENGTH, kinds=kinds),))
