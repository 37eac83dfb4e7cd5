"""Algorithm 1: for each sequence of a batch, a record whose maps may stand in for its own, or none.

length groups that do not pay      -> computed in full
sequences that are too strange     -> computed in full, unless they are recorded themselves
groups that are searched           -> the nearest records, and the policy decides
groups that are not                -> the mean of the length
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import torch

from attncache_core.attention_maps.familiarity import Familiarity
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
    UNFAMILIAR = "unfamiliar"  # not searched, since it does not resemble what the budget was measured on
    CANNOT_PAY = "cannot_pay"  # not searched, since at its length reuse is measured not to save enough time

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
    reasons: np.ndarray  # int64 [sequences]: place in `Outcome` of what a sequence without a record is
    strangeness: np.ndarray  # float32 [sequences], nan where it was not asked for; see familiarity.py
    corrupt_records: int = 0  # records that were found damaged; their sequences are misses

    @property
    def hits(self) -> np.ndarray:
        """bool [sequences]."""
        return self.records >= 0

    def outcomes(self) -> np.ndarray:
        """Outcome of each sequence, object [sequences]."""
        # By numbers: an assignment would make plain strings of them.
        outcomes = self.reasons.copy()
        compared = (outcomes == place_of(Outcome.NOT_SEARCHED)) & ~np.isnan(self.similarities)
        outcomes[compared] = place_of(Outcome.MISS)
        for kind, outcome in _HITS.items():
            outcomes[self.hits & (self.kinds == kind)] = place_of(outcome)
        return np.array(_ALL, dtype=object)[outcomes]

    def reordered(self, permutation: np.ndarray) -> ReusePlan:
        """The plan of the batch whose packed sequences were permuted alike."""
        return ReusePlan(
            self.records[permutation],
            self.kinds[permutation],
            self.similarities[permutation],
            self.reasons[permutation],
            self.strangeness[permutation],
            self.corrupt_records,
        )


def place_of(outcome: Outcome) -> int:
    """Return the number that stands for an outcome in `ReusePlan.reasons`."""
    return _ALL.index(outcome)


def no_reuse(sequences: int) -> ReusePlan:
    """The plan that computes everything."""
    return ReusePlan(
        np.full(sequences, -1),
        np.full(sequences, RecordKind.STORED, dtype=np.int64),
        np.full(sequences, np.nan, dtype=np.float32),
        np.full(sequences, place_of(Outcome.NOT_SEARCHED)),
        np.full(sequences, np.nan, dtype=np.float32),
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
    familiarity: Familiarity | None = None  # None: the policy has no limit of strangeness
    # Length -> records that serve nobody, for which the index must be one without them.
    left_out: Mapping[int, Collection[int]] = field(default_factory=dict)
    # Numbers of the length groups in which reuse is measured to save time; None: all count as such.
    paying: frozenset[int] | None = None

    def plan(self, batch: TokenBatch, hidden: torch.Tensor, allowed: np.ndarray) -> ReusePlan:
        """Return the reuse plan of a batch from the input of its first layer [tokens, hidden].

        allowed: bool [sequences], for each packed sequence whether reuse may be tried. A sequence whose
        tokens are recorded has similarity 1. A record that fails its checksum serves nobody.
        """
        plan = no_reuse(len(batch.lengths))
        served = []
        for group in batch.groups():
            if not self.can_serve(group.length) or not allowed[group.sequences].any():
                continue
            if self._pays(group.length):
                served.append(group)
            else:
                _enter(plan, group, allowed, Outcome.CANNOT_PAY)
        if not served:
            return plan
        familiar = self._familiar(batch, plan)
        compared = [
            group
            for group in served
            if self._is_searched(group.length) and (allowed & familiar)[group.sequences].any()
        ]
        if compared:
            self._decide(batch, compared, self.nearest(batch, hidden, compared), plan)
        refused = ~allowed | (~familiar & (plan.similarities < 1))
        for values, untouched in ((plan.records, -1), (plan.similarities, np.nan)):
            values[refused] = untouched
        corrupt = self._drop_corrupt(compared, plan)
        for group in served:
            if group not in compared:
                corrupt += self._take_unsearched(batch, group, allowed, familiar, plan)
            _enter(plan, group, allowed & ~familiar, Outcome.UNFAMILIAR)
        return replace(plan, corrupt_records=corrupt)

    def _pays(self, length: int) -> bool:
        return self.paying is None or self.policy.place_of(length) in self.paying

    def _familiar(self, batch: TokenBatch, plan: ReusePlan) -> np.ndarray:
        """Return which sequences resemble what the policy was calibrated on, bool [sequences].

        Enters their strangeness in the plan.
        """
        limit = self.policy.limit
        if self.familiarity is None or limit is None:
            return np.ones(len(batch.lengths), dtype=bool)
        ids = batch.ids[: batch.offsets[-1]].cpu().numpy()
        plan.strangeness[:] = self.familiarity.strangeness(ids, batch.lengths)
        return plan.strangeness <= limit.strangest

    def _is_searched(self, length: int) -> bool:
        """Whether sequences of this length are compared; those that nobody calibrated for always are."""
        uncalibrated = length > self.policy.groups[-1].longest or length not in self.prototypes
        return uncalibrated or self.policy.group_of(length).searched

    def can_serve(self, length: int) -> bool:
        """Whether there are records of this length, and the policy ever lets one serve."""
        held = self.store.may_serve(length) and (length in self.index or length in self.prototypes)
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

    def _take_unsearched(
        self, batch: TokenBatch, group: Group, allowed: np.ndarray, familiar: np.ndarray, plan: ReusePlan
    ) -> int:
        """Enter recorded sequences' own records and, for other familiar ones, the mean of the length.

        In a group that is searched the mean serves nobody: all of its sequences are unfamiliar then. Returns
        how many records were damaged and passed over.
        """
        segment, corrupt = self.store.segments[group.length], 0
        left_out = self.left_out.get(group.length, ())
        serves = not self._is_searched(group.length) and self.policy.group_of(group.length).mean_serves
        mean = self.prototypes.means[group.length] if serves else None
        for place, ids in enumerate(batch.ids[group.tokens].view(group.count, group.length).cpu().numpy()):
            sequence = group.first + place
            own = segment.record_of(ids) if allowed[sequence] else None
            common = mean if familiar[sequence] else None
            for record, kind in ((own, RecordKind.STORED), (common, RecordKind.MEAN)):
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


def _enter(plan: ReusePlan, group: Group, sequences: np.ndarray, reason: Outcome) -> None:
    """Enter why sequences of the group (those marked in bool [sequences]) are without a record."""
    plan.reasons[group.sequences][sequences[group.sequences]] = place_of(reason)


# Below this similarity a record cannot be the sequence's own, whatever the rounding.
_SURELY_OTHER = 0.999
# θ = 1 admits recorded sequences only, so another one's record never gets there.
MOST_SIMILAR_OTHER = float(np.nextafter(np.float32(1), np.float32(0)))
