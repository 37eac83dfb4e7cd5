"""Algorithm 1: for each sequence of a batch, a record whose maps may stand in for its own, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import torch

from attncache_core.attention_maps.index import FeatureIndex
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.store import AttentionMapStore
from attncache_core.tokens import Group, TokenBatch


class Outcome(StrEnum):
    """What became of a sequence; each has exactly one."""

    HIT = "hit"  # some of its heads came from a record
    MISS = "miss"  # searched, and no record was near enough
    NOT_SEARCHED = "not_searched"  # reuse was declined, or no record of its length exists
    CANNOT_PAY = "cannot_pay"  # not searched, since at its length a search costs more than a hit saves


@dataclass(frozen=True)
class ReusePlan:
    """Which record serves which sequence, in the packed order of the batch that was searched."""

    records: np.ndarray  # int64 [sequences], -1 for none
    similarities: np.ndarray  # float32 [sequences], nan where nothing was searched
    cannot_pay: np.ndarray  # bool [sequences], left out for their length
    corrupt_records: int = 0  # records that were found damaged; their sequences are misses

    @property
    def hits(self) -> np.ndarray:
        """bool [sequences]."""
        return self.records >= 0

    def outcomes(self) -> np.ndarray:
        """Outcome of each sequence, object [sequences]."""
        outcomes = np.full(len(self.records), Outcome.MISS, dtype=object)
        outcomes[self.hits] = Outcome.HIT
        outcomes[np.isnan(self.similarities)] = Outcome.NOT_SEARCHED
        outcomes[self.cannot_pay] = Outcome.CANNOT_PAY
        return outcomes

    def reordered(self, permutation: np.ndarray) -> ReusePlan:
        """The plan of the batch whose packed sequences were permuted alike."""
        return ReusePlan(
            self.records[permutation],
            self.similarities[permutation],
            self.cannot_pay[permutation],
            self.corrupt_records,
        )


def no_reuse(sequences: int) -> ReusePlan:
    """The plan that computes everything."""
    return ReusePlan(
        np.full(sequences, -1), np.full(sequences, np.nan, dtype=np.float32), np.zeros(sequences, dtype=bool)
    )


@dataclass(frozen=True)
class SearchEngine:
    """Projector, index and store, and the threshold θ that decides whether near is near enough."""

    projector: FeatureProjector
    index: FeatureIndex
    store: AttentionMapStore
    threshold: float

    def plan(
        self,
        batch: TokenBatch,
        hidden: torch.Tensor,
        allowed: np.ndarray,
        pays: Callable[[int], bool] = lambda _: True,
    ) -> ReusePlan:
        """The reuse plan of a batch from the input of its first layer [tokens, hidden].

        allowed: bool [sequences], for each packed sequence whether reuse may be tried. pays: whether it is
        worth a search at this length. One whose tokens are recorded has similarity 1. A record that fails
        its checksum serves nobody.
        """
        plan = no_reuse(len(batch.lengths))
        groups = [group for group in batch.groups() if group.length in self.index]
        asked = []
        for group in groups:
            if not pays(group.length):
                plan.cannot_pay[group.sequences] = allowed[group.sequences]
            elif allowed[group.sequences].any():
                asked.append(group)
        corrupt = 0
        for group, features in zip(
            asked, self.projector.project(hidden, asked) if asked else [], strict=True
        ):
            corrupt += self._search(batch, group, features, allowed[group.sequences], plan)
        return replace(plan, corrupt_records=corrupt)

    def _search(
        self, batch: TokenBatch, group: Group, features: np.ndarray, allowed: np.ndarray, plan: ReusePlan
    ) -> int:
        """Enter what was found for a group into the plan; answers how many records were corrupt."""
        sequences = group.first + np.flatnonzero(allowed)
        found, distances = self.index.nearest(group.length, features[allowed])
        similarities = 1.0 - distances
        # A self-hit's distance is zero but for rounding, which differs between batches.
        for place in np.flatnonzero(similarities > _SURELY_OTHER).tolist():
            recorded = self._is_recorded(batch, int(sequences[place]), group, int(found[place]))
            similarities[place] = 1.0 if recorded else min(similarities[place], MOST_SIMILAR_OTHER)
        plan.similarities[sequences] = similarities
        near = similarities >= self.threshold
        sound = self.store.segments[group.length].are_sound(found[near])
        plan.records[sequences[near]] = np.where(sound, found[near], -1)
        return int((~sound).sum())

    def _is_recorded(self, batch: TokenBatch, sequence: int, group: Group, record: int) -> bool:
        start = int(batch.offsets[sequence])
        ids = batch.ids[start : start + group.length].tolist()
        return self.store.segments[group.length].holds_tokens(record, ids)


# Below this similarity a record cannot be the sequence's own, whatever the rounding.
_SURELY_OTHER = 0.999
# θ = 1 admits recorded sequences only, so another one's record never gets there.
MOST_SIMILAR_OTHER = float(np.nextafter(np.float32(1), np.float32(0)))
