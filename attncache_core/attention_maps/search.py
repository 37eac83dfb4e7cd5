"""Algorithm 1: for each sequence of a batch, a record whose maps may stand in for its own, or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import torch

from attncache_core.attention_maps.index import FeatureIndex
from attncache_core.attention_maps.policy import ReusePolicy
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.prototypes import PrototypeIndex
from attncache_core.attention_maps.store import AttentionMapStore, RecordKind
from attncache_core.tokens import Group, TokenBatch


class Outcome(StrEnum):
    """What became of a sequence; each has exactly one."""

    HIT = "hit"  # some of its heads came from the record of one sentence
    PROTOTYPE_HIT = "prototype_hit"  # some of its heads came from a synthetic record
    MISS = "miss"  # searched, and no record was near enough
    NOT_SEARCHED = "not_searched"  # reuse was declined, or no record of its length exists
    CANNOT_PAY = "cannot_pay"  # not searched, since at its length a search costs more than a hit saves

    @property
    def is_hit(self) -> bool:
        """Whether maps were reused, of whatever kind of record."""
        return self in _HITS.values()


_ALL = list(Outcome)
_HITS = {
    RecordKind.STORED: Outcome.HIT,
    RecordKind.PROTOTYPE: Outcome.PROTOTYPE_HIT,
    RecordKind.MEAN: Outcome.PROTOTYPE_HIT,
}


@dataclass(frozen=True)
class ReusePlan:
    """Which record serves which sequence, in the packed order of the batch that was searched."""

    records: np.ndarray  # int64 [sequences], -1 for none
    kinds: np.ndarray  # RecordKind of each record, int64 [sequences]
    similarities: np.ndarray  # float32 [sequences], nan where nothing was compared
    cannot_pay: np.ndarray  # bool [sequences], left out for their length
    corrupt_records: int = 0  # records that were found damaged; their sequences are misses

    @property
    def hits(self) -> np.ndarray:
        """bool [sequences]."""
        return self.records >= 0

    def outcomes(self) -> np.ndarray:
        """Outcome of each sequence, object [sequences]."""
        # By numbers: an assignment would make plain strings of them.
        outcomes = np.full(len(self.records), _ALL.index(Outcome.MISS))
        outcomes[np.isnan(self.similarities)] = _ALL.index(Outcome.NOT_SEARCHED)
        for kind, outcome in _HITS.items():
            outcomes[self.hits & (self.kinds == kind)] = _ALL.index(outcome)
        outcomes[self.cannot_pay] = _ALL.index(Outcome.CANNOT_PAY)
        return np.array(_ALL, dtype=object)[outcomes]

    def reordered(self, permutation: np.ndarray) -> ReusePlan:
        """The plan of the batch whose packed sequences were permuted alike."""
        return ReusePlan(
            self.records[permutation],
            self.kinds[permutation],
            self.similarities[permutation],
            self.cannot_pay[permutation],
            self.corrupt_records,
        )


def no_reuse(sequences: int) -> ReusePlan:
    """The plan that computes everything."""
    return ReusePlan(
        np.full(sequences, -1),
        np.full(sequences, RecordKind.STORED, dtype=np.int64),
        np.full(sequences, np.nan, dtype=np.float32),
        np.zeros(sequences, dtype=bool),
    )


@dataclass(frozen=True)
class NearestRecords:
    """The nearest record of each kind, of the sequences of some groups, one after the other."""

    records: dict[RecordKind, np.ndarray]  # int64 [sequences], -1 for none
    similarities: dict[RecordKind, np.ndarray]  # float32 [sequences], -inf for none

    def rows(self, chosen: np.ndarray) -> dict[RecordKind, np.ndarray]:
        """The similarities of the chosen sequences (places or bool [sequences])."""
        return {kind: similarities[chosen] for kind, similarities in self.similarities.items()}


@dataclass(frozen=True)
class SearchEngine:
    """Projector, indices and store, and the policy that decides whether near is near enough."""

    projector: FeatureProjector
    index: FeatureIndex
    prototypes: PrototypeIndex
    store: AttentionMapStore
    policy: ReusePolicy
    # Length -> records that serve nobody, for which the index must be one without them.
    left_out: Mapping[int, Collection[int]] = field(default_factory=dict)

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
        compared, taken = [], []
        for group in batch.groups():
            if not self.can_serve(group.length) or not allowed[group.sequences].any():
                continue
            if not self._is_searched(group.length):
                taken.append(group)
            elif pays(group.length):
                compared.append(group)
            else:
                plan.cannot_pay[group.sequences] = allowed[group.sequences]
        if compared:
            self._decide(batch, compared, self.nearest(batch, hidden, compared), plan)
        for values, untouched in ((plan.records, -1), (plan.similarities, np.nan)):
            values[~allowed] = untouched
        corrupt = self._drop_corrupt(compared, plan)
        for group in taken:
            corrupt += self._take_unsearched(batch, group, allowed, plan)
        return replace(plan, corrupt_records=corrupt)

    def _is_searched(self, length: int) -> bool:
        """Whether sequences of this length are compared; those that nobody calibrated for always are."""
        uncalibrated = length > self.policy.groups[-1].longest or length not in self.prototypes
        return uncalibrated or self.policy.group_of(length).searched

    def can_serve(self, length: int) -> bool:
        """Whether there are records of this length, and the policy ever lets one serve."""
        held = length in self.index or length in self.prototypes
        return held and not self.policy.group_of(length).is_off

    def nearest(self, batch: TokenBatch, hidden: torch.Tensor, groups: Sequence[Group]) -> NearestRecords:
        """The nearest records of the sequences of these groups, from the first layer's input."""
        features = self.projector.project(hidden, groups)
        stored = [self._nearest_stored(batch, *asked) for asked in zip(groups, features, strict=True)]
        lengths = np.repeat([group.length for group in groups], [group.count for group in groups])
        found = NearestRecords(
            {RecordKind.STORED: np.concatenate([records for records, _ in stored])},
            {RecordKind.STORED: np.concatenate([similarities for _, similarities in stored])},
        )
        asked = np.concatenate(features)
        for kind in (RecordKind.PROTOTYPE, RecordKind.MEAN):
            found.records[kind], distances = self.prototypes.nearest(kind, lengths, asked)
            found.similarities[kind] = np.minimum(1.0 - distances, MOST_SIMILAR_OTHER)
        return found

    def _nearest_stored(
        self, batch: TokenBatch, group: Group, features: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Records and similarities of a group; similarity 1 for recorded tokens and for no others."""
        if group.length not in self.index:
            return np.full(group.count, -1), np.full(group.count, -np.inf, dtype=np.float32)
        records, distances = self.index.nearest(group.length, features)
        similarities = 1.0 - distances
        # A self-hit's distance is zero but for rounding, which differs between batches.
        for place in np.flatnonzero(similarities > _SURELY_OTHER).tolist():
            recorded = self._is_recorded(batch, group.first + place, group, int(records[place]))
            similarities[place] = 1.0 if recorded else min(similarities[place], MOST_SIMILAR_OTHER)
        return records, similarities

    def _is_recorded(self, batch: TokenBatch, sequence: int, group: Group, record: int) -> bool:
        start = int(batch.offsets[sequence])
        ids = batch.ids[start : start + group.length].tolist()
        return self.store.segments[group.length].holds_tokens(record, ids)

    def _take_unsearched(self, batch: TokenBatch, group: Group, allowed: np.ndarray, plan: ReusePlan) -> int:
        """Enter recorded sequences' own records and, for the others, the mean of the group's length.

        Answers how many records were damaged and passed over.
        """
        segment, corrupt = self.store.segments[group.length], 0
        left_out = self.left_out.get(group.length, ())
        serves = self.policy.group_of(group.length).mean_serves
        mean = self.prototypes.means[group.length] if serves else None
        for place, ids in enumerate(batch.ids[group.tokens].view(group.count, group.length).cpu().numpy()):
            sequence = group.first + place
            own = segment.record_of(ids) if allowed[sequence] else None
            for record, kind in ((own, RecordKind.STORED), (mean, RecordKind.MEAN)):
                if record is None or record in left_out or not allowed[sequence]:
                    continue
                if segment.is_sound(record):
                    plan.records[sequence], plan.kinds[sequence] = record, kind
                    if kind is RecordKind.STORED:
                        plan.similarities[sequence] = 1.0
                    break
                corrupt += 1
        return corrupt

    def _decide(
        self, batch: TokenBatch, groups: Sequence[Group], nearest: NearestRecords, plan: ReusePlan
    ) -> None:
        """Enter which record serves whom, by the policy of each sequence's length group."""
        sequences = np.concatenate([np.arange(g.first, g.first + g.count) for g in groups])
        places = self.policy.places_of(batch.lengths[sequences])
        for place in np.unique(places).tolist():
            rows = np.flatnonzero(places == place)
            similarities = nearest.rows(rows)
            kinds, served = self.policy.groups[place].choose(similarities)
            plan.kinds[sequences[rows]] = kinds
            for kind in similarities:
                of_kind = kinds == kind
                mine = sequences[rows[of_kind]]
                plan.similarities[mine] = similarities[kind][of_kind]
                plan.records[mine] = np.where(served[of_kind], nearest.records[kind][rows[of_kind]], -1)

    def _drop_corrupt(self, groups: Sequence[Group], plan: ReusePlan) -> int:
        """Take damaged records out of the plan; answers how many there were."""
        corrupt = 0
        for group in groups:
            records = plan.records[group.sequences]
            hits = records >= 0
            sound = self.store.segments[group.length].are_sound(records[hits])
            records[hits] = np.where(sound, records[hits], -1)
            corrupt += int((~sound).sum())
        return corrupt


# Below this similarity a record cannot be the sequence's own, whatever the rounding.
_SURELY_OTHER = 0.999
# θ = 1 admits recorded sequences only, so another one's record never gets there.
MOST_SIMILAR_OTHER = float(np.nextafter(np.float32(1), np.float32(0)))
