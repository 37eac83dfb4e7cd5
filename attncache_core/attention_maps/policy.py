"""When a record may serve: for each group of lengths, and each kind of record, a threshold and a curve.

The search finds the best record of each kind. The kind's curve says what damage to expect of it; the one
with the least serves, if its similarity reaches the kind's θ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from attncache_core.attention_maps.store import RecordKind

# The papers' scale: similarity 0.99 is a predicted mean map distance of 0.05.
PRESETS = {"conservative": 0.995, "moderate": 0.99, "aggressive": 0.95}
# What is left of 1 - θ when a length group is tightened, and how often before it is switched off.
_KEPT_WHEN_TIGHTENED = 0.75
_MOST_TIGHTENED = 6


class Measure(StrEnum):
    """In what quality is counted; always a mean over hits."""

    COSINE = "cosine"  # of the output with reuse to the full model's
    AGREEMENT = "agreement"  # share of decisions that stay what they were


@dataclass(frozen=True)
class Budget:
    """The quality that hits must keep: the mean of the measure is at least `least`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    measure: Measure
    least: float


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
        if len(self.similarities) != len(self.damages) or list(self.similarities) != sorted(
            self.similarities
        ):
            raise ValueError("a curve needs as many damages as similarities, and these rising")

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
    tightened: int = 0  # times, since it was calibrated

    def with_threshold(self, threshold: float) -> LengthGroup:
        """The same with one θ for all kinds."""
        kinds = {kind: replace(policy, threshold=threshold) for kind, policy in self.kinds.items()}
        return replace(self, kinds=kinds)

    def one_tighter(self) -> LengthGroup:
        """The same with every θ a quarter nearer to 1; after the sixth time none is ever reached."""
        kinds = {
            kind: replace(policy, threshold=1 - (1 - policy.threshold) * _KEPT_WHEN_TIGHTENED)
            for kind, policy in self.kinds.items()
        }
        tighter = replace(self, kinds=kinds, tightened=self.tightened + 1)
        return tighter if tighter.tightened < _MOST_TIGHTENED else tighter.with_threshold(math.inf)

    @property
    def is_off(self) -> bool:
        """Whether nothing can hit, not even a recorded sequence."""
        return all(policy.threshold > 1 for policy in self.kinds.values())


@dataclass(frozen=True)
class ReusePolicy:
    """The budget, and what was found to keep it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    budget: Budget
    groups: tuple[LengthGroup, ...]  # `longest` rises; the last also takes what is longer

    def __post_init__(self) -> None:
        """Raise ValueError if there is no group or their order is another."""
        longest = [group.longest for group in self.groups]
        if not longest or longest != sorted(set(longest)):
            raise ValueError("length groups must rise")

    def place_of(self, length: int) -> int:
        """Number of the group that takes sequences of `length` tokens."""
        longest = [group.longest for group in self.groups[:-1]]
        return int(np.searchsorted(longest, length))

    def group_of(self, length: int) -> LengthGroup:
        """The group that takes sequences of `length` tokens."""
        return self.groups[self.place_of(length)]

    def names(self) -> list[str]:
        """The groups for people: "2-13", "14-20", ... and "21-" for the last."""
        firsts = [2, *(group.longest + 1 for group in self.groups[:-1])]
        lasts: Sequence[int | str] = [*(group.longest for group in self.groups[:-1]), ""]
        return [f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]

    def with_threshold(self, threshold: float) -> ReusePolicy:
        """The same with one θ for all lengths and kinds: an operator's, or a preset's."""
        return replace(self, groups=tuple(group.with_threshold(threshold) for group in self.groups))

    def tightened(self, place: int) -> ReusePolicy:
        """The same with group number `place` one step tighter."""
        groups = list(self.groups)
        groups[place] = groups[place].one_tighter()
        return replace(self, groups=tuple(groups))


def uniform_policy(budget: Budget, threshold: float) -> ReusePolicy:
    """One group for all lengths, one θ for all kinds, no curves: what stands before any calibration."""
    kinds = {kind: KindPolicy(threshold) for kind in RecordKind}
    return ReusePolicy(budget, (LengthGroup(longest=1, kinds=kinds),))
