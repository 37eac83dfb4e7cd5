"""Decide which record serves a sequence, for the sequences of one length group.

The search finds the nearest record of each kind. The curve of a kind gives the damage to expect from the
similarity of the record. The record with the least expected damage serves, if its similarity reaches the
threshold θ of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from attncache_core.reuse.maps.tightening import KEPT_SHARE, MOST_STEPS
from attncache_core.reuse.storage.layout import RecordKind

# A threshold that no similarity reaches. It is finite because a manifest holds only finite thresholds.
_NEVER = 2.0


@dataclass(frozen=True)
class KindPolicy:
    """When records of one kind may serve: the threshold θ, and the expected damage by similarity.

    The expected damage is a curve through points. It is linear between points, and constant before the first
    point and after the last point. Without points it is 1 - similarity.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

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
class LengthGroup:
    """The policy of the sequences with more tokens than the previous group's maximum, up to `longest`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    longest: int  # tokens
    kinds: dict[RecordKind, KindPolicy]
    # If False, sequences are not compared with records. The mean of each length serves every sequence, unless
    # the θ of the mean is above 1; a recorded sequence is recognised by its tokens and takes its own record.
    # The thresholds of the other kinds hold after the first step of tightening, which starts the search.
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

        If the group was not searched, the first step starts the search. If only recorded sequences could hit,
        the first step switches the group off.
        """
        if not self.searched:
            if not self.mean_serves:
                return replace(self.with_threshold(math.inf), tightened=self.tightened + 1)
            return replace(self, searched=True, tightened=self.tightened + 1)
        kinds = {
            kind: replace(policy, threshold=1 - (1 - policy.threshold) * KEPT_SHARE)
            for kind, policy in self.kinds.items()
        }
        tighter = replace(self, kinds=kinds, tightened=self.tightened + 1)
        return tighter if tighter.tightened < MOST_STEPS else tighter.with_threshold(math.inf)

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
