"""Plan which records serve the sequences of a batch (Algorithm 1 of AttnCache).

length groups that do not pay        -> computed in full
sequences that are too strange       -> computed in full, unless they are recorded
length groups with a search          -> the nearest record of each kind, if the policy lets it serve
length groups without a search       -> the sequence's own record, or the mean of the length
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.native.search import NativeSearch, RecordVectors
from attncache_core.reuse.maps.familiarity import Familiarity
from attncache_core.reuse.maps.index import FeatureIndex
from attncache_core.reuse.maps.policy import ReusePolicy
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.maps.prototypes import PrototypeIndex
from attncache_core.reuse.plan import ALL_LAYERS, Outcome, ReusePlan, no_reuse, outcome_code
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.text.token_batch import Group, TokenBatch


class NearestRecords(NamedTuple):
    """The nearest record of each kind, for the sequences of some groups, group after group."""

    records: np.ndarray  # int64 [kinds, sequences] by RecordKind, -1: no record
    similarities: np.ndarray  # float32 [kinds, sequences], -inf: no record


@dataclass(frozen=True)
class SearchPlan(ReusePlan):
    """The plan of a batch, and the data that the search needs to finish the plan."""

    allowed: np.ndarray = field(kw_only=True)  # bool [sequences], whether reuse is allowed
    familiar: np.ndarray = field(kw_only=True)  # bool [sequences], whether the text is not too strange
    compared: tuple[Group, ...] = ()  # groups to search once the first hidden states are known


@dataclass(frozen=True)
class SearchEngine(ReuseStrategy):
    """The reuse strategy that searches records with a projector and indexes, and applies a policy."""

    projector: FeatureProjector
    index: FeatureIndex
    prototypes: PrototypeIndex
    store: AttentionMapStore
    policy: ReusePolicy
    familiarity: Familiarity | None = None  # None: the policy has no limit of strangeness
    # Length -> records that serve no sequence. `index` must be an index without these records.
    excluded: Mapping[int, Collection[int]] = field(default_factory=dict)
    # Indices of the length groups in which reuse is measured to save time; None: all groups.
    paying: frozenset[int] | None = None
    least_tokens: int = 0  # of a batch in which reuse saves time
    # Index of a length group -> seconds that a hit saves per token. In other groups no record is cold.
    saved_per_token: Mapping[int, float] = field(default_factory=dict)

    def rule_out(self, lengths: np.ndarray, allowed: np.ndarray) -> np.ndarray | None:
        """Return the reasons if the batch is too small or no length pays; see ReuseStrategy.rule_out."""
        served = [length for length in set(lengths[allowed].tolist()) if self._has_records(length)]
        is_large = int(lengths.sum()) >= self.least_tokens
        if is_large and any(map(self._pays, served)):
            return None
        reasons = no_reuse(len(lengths)).reasons
        for length in served:
            reasons[allowed & (lengths == length)] = outcome_code(Outcome.SKIPPED_BY_COST)
        return reasons

    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> SearchPlan:
        """Return the plan of a batch, as far as the tokens decide it; see ReuseStrategy.plan.

        If a group must be searched, the plan covers no layer, and `refine` finishes the plan. A recorded
        sequence has similarity 1. A record that fails its checksum serves no sequence.
        """
        count = len(batch.lengths)
        nothing, segments = no_reuse(count), self.store.segments
        served, familiar = self._servable(batch, nothing, allowed), np.ones(count, dtype=bool)
        if served:
            familiar = self._familiar(batch, nothing)
        may_be_compared, all_familiar, corrupt = allowed & familiar, familiar.all(), 0
        compared = []
        for group in served:
            if not all_familiar:
                _set_reason(nothing, group, allowed & ~familiar, Outcome.UNFAMILIAR)
            if self.is_searched(group.length) and may_be_compared[group.sequences].any():
                compared.append(group)
            else:
                corrupt += self._plan_unsearched(batch, group, allowed, familiar, nothing)
        return SearchPlan(
            nothing.records,
            nothing.kinds,
            nothing.similarities,
            nothing.reasons,
            nothing.strangeness,
            segments,
            until=0 if compared else ALL_LAYERS,
            corrupt_records=corrupt,
            allowed=allowed,
            familiar=familiar,
            compared=tuple(compared),
        )

    def refine(self, plan: ReusePlan, batch: TokenBatch, hidden: torch.Tensor) -> SearchPlan:
        """Search the groups that the plan has left open; see ReuseStrategy.refine.

        hidden: input of the first layer, [tokens, hidden]. The arrays of `plan` are changed in place.
        """
        assert isinstance(plan, SearchPlan)
        nearest = self.nearest(batch, hidden, plan.compared, plan.segments)
        self._apply_policy(plan.compared, nearest, plan)
        if not (plan.allowed.all() and plan.familiar.all()):
            # Sequences that are not compared have no similarity.
            refused = ~plan.allowed | (~plan.familiar & (plan.similarities < 1))
            for group in plan.compared:
                rows = group.sequences
                plan.records[rows][refused[rows]] = -1
                plan.similarities[rows][refused[rows]] = np.nan
        for group in plan.compared:
            records = plan.records[group.sequences]
            hits = np.flatnonzero(records >= 0)
            cold = hits[self._are_cold(plan.segments[group.length], records[hits])]
            records[cold], plan.reasons[group.sequences][cold] = -1, outcome_code(Outcome.COLD)
        corrupt = plan.corrupt_records + self._drop_corrupt(plan.compared, plan)
        return replace(plan, until=ALL_LAYERS, corrupt_records=corrupt)

    def _servable(self, batch: TokenBatch, plan: ReusePlan, allowed: np.ndarray) -> list[Group]:
        """Return the groups that records may serve. Marks groups in the plan where reuse saves no time."""
        served = []
        is_large = batch.offsets[-1] >= self.least_tokens
        for group in batch.groups():
            held = self.store.may_serve(group.length) and self._has_records(group.length)
            if held and allowed[group.sequences].any():
                if is_large and self._pays(group.length):
                    served.append(group)
                else:
                    _set_reason(plan, group, allowed, Outcome.SKIPPED_BY_COST)
        return served

    def _pays(self, length: int) -> bool:
        return self.paying is None or self.policy.group_index(length) in self.paying

    def _familiar(self, batch: TokenBatch, plan: ReusePlan) -> np.ndarray:
        """Return which sequences are within the policy's limit of strangeness, bool [sequences].

        Writes the strangeness of each sequence to the plan.
        """
        limit = self.policy.limit
        if self.familiarity is None or limit is None:
            return np.ones(len(batch.lengths), dtype=bool)
        ids = batch.ids.cpu().numpy()
        plan.strangeness[:] = self.familiarity.strangeness(ids, batch.lengths)
        return plan.strangeness <= limit.strangest

    def is_searched(self, length: int) -> bool:
        """Return whether sequences of this length are compared with records.

        Lengths that are longer than the calibrated lengths, or have no mean, are always compared.
        """
        uncalibrated = length > self.policy.groups[-1].longest or length not in self.prototypes
        return uncalibrated or self.policy.group_of(length).searched

    def _are_cold(self, segment: Segment, records: np.ndarray) -> np.ndarray:
        """Return which records (int64 [n]) are not in memory and take longer to read than a hit saves.

        Call this method before the records are checked, because the check reads them.
        """
        saved = self.saved_per_token.get(self.policy.group_index(segment.length))
        if saved is None:
            return np.zeros(len(records), dtype=bool)
        return segment.are_cold(records, saved * segment.length)

    def _has_records(self, length: int) -> bool:
        """Return whether records of this length exist, and the policy lets any of them serve."""
        held = length in self.store.segments and (length in self.index or length in self.prototypes)
        return held and not self.policy.group_of(length).is_off

    def nearest(
        self,
        batch: TokenBatch,
        hidden: torch.Tensor,
        groups: Sequence[Group],
        segments: Mapping[int, Segment] | None = None,
    ) -> NearestRecords:
        """Return the nearest records of the sequences of these groups.

        hidden: input of the first layer, [tokens, hidden]. segments: length -> segment with the records;
        None: the segments of the store.
        """
        segments = self.store.segments if segments is None else segments
        if self._compiled:
            queries, *both = self._compiled.nearest(hidden.cpu(), _laid_out(groups))
            found = NearestRecords(*both)
        else:
            queries = np.concatenate(self.projector.project(hidden, groups))
            found = self._plainly_nearest(queries, groups)
        self._search_stored(batch, groups, queries, found, segments)
        return found

    @cached_property
    def _compiled(self) -> NativeSearch | None:
        """The search by compiled code; None without the code."""
        packed = self.projector.packed
        if packed is None:
            return None
        none = np.zeros((0, self.projector.dimensions), np.float32)
        vectors = {}
        # A lost segment leaves the store, and a batch that was planned before still looks for its length.
        for length in {*self.store.segments, *self.index.lengths, *self.prototypes.lengths.tolist()}:
            stored = self.index.vectors(length)
            vectors[length] = RecordVectors(
                none if stored is None else stored, *self.prototypes.of_length(length)
            )
        return NativeSearch(*packed, vectors)

    def _plainly_nearest(self, features: np.ndarray, groups: Sequence[Group]) -> NearestRecords:
        """Return the nearest synthetic records, without compiled code, and no records of sentences yet."""
        shape = len(RecordKind), len(features)
        found = NearestRecords(np.full(shape, -1), np.full(shape, -np.inf, np.float32))
        first = 0
        for group in groups:
            rows = slice(first, first + group.count)
            for kind in (RecordKind.PROTOTYPE, RecordKind.MEAN):
                records, distances = self.prototypes.nearest(kind, group.length, features[rows])
                found.records[kind, rows] = records
                found.similarities[kind, rows] = np.minimum(1.0 - distances, MOST_SIMILAR_OTHER)
            first = rows.stop
        return found

    def _search_stored(
        self,
        batch: TokenBatch,
        groups: Sequence[Group],
        features: np.ndarray,
        found: NearestRecords,
        segments: Mapping[int, Segment],
    ) -> None:
        """Write the nearest records of sentences that Faiss searches, and recognise recorded sequences.

        features: float32 [sequences, dimensions]. A similarity is 1 exactly if the sequence is recorded. Its
        tokens tell that: the distance to its own record is rounded, differently in each data type, and Faiss
        may miss the record.
        """
        records, similarities = found.records[RecordKind.STORED], found.similarities[RecordKind.STORED]
        firsts = list(accumulate((group.count for group in groups), initial=0))
        for group, first in zip(groups, firsts, strict=False):
            if self.index.is_compressed(group.length) if self._compiled else group.length in self.index:
                rows = slice(first, first + group.count)
                records[rows], distances = self.index.nearest(group.length, features[rows])
                similarities[rows] = 1.0 - distances
        np.minimum(similarities, MOST_SIMILAR_OTHER, out=similarities)
        ids = batch.ids.cpu().numpy()
        for group, first in zip(groups, firsts, strict=False):
            segment = segments.get(group.length)
            if segment is None or group.length not in self.index:
                continue
            # A build searches the first records of a length, those that it does not hold out.
            searched, excluded = self.index.size(group.length), self.excluded.get(group.length, ())
            for row, sequence in enumerate(ids[group.tokens].reshape(group.count, -1), first):
                record = segment.record_of(sequence)
                if record is not None and record < searched and record not in excluded:
                    records[row], similarities[row] = record, 1.0

    def _plan_unsearched(
        self, batch: TokenBatch, group: Group, allowed: np.ndarray, familiar: np.ndarray, plan: ReusePlan
    ) -> int:
        """Plan a group without a search: a recorded sequence takes its record, a familiar one the mean.

        A length that is searched comes here only if no allowed sequence of the group is familiar, and then
        the mean serves no sequence. Returns the number of damaged records that were skipped.
        """
        segment, corrupt = self.store.segments[group.length], 0
        excluded = self.excluded.get(group.length, ())
        serves = not self.is_searched(group.length) and self.policy.group_of(group.length).mean_serves
        mean = self.prototypes.means[group.length] if serves else None
        sequences = batch.ids.cpu().numpy()[group.tokens].reshape(-1, group.length)
        stored = [
            segment.record_of(ids) if may else None
            for ids, may in zip(sequences, allowed[group.sequences], strict=True)
        ]
        candidates = np.array([record for record in (*stored, mean) if record is not None], dtype=np.int64)
        cold = set(candidates[self._are_cold(segment, candidates)].tolist())
        for sequence, recorded in enumerate(stored, group.first):
            common = mean if familiar[sequence] else None
            for record, kind in ((recorded, RecordKind.STORED), (common, RecordKind.MEAN)):
                if record is None or record in excluded or not allowed[sequence]:
                    continue
                if record in cold:
                    plan.reasons[sequence] = outcome_code(Outcome.COLD)
                    continue
                if segment.is_sound(record):
                    plan.records[sequence], plan.kinds[sequence] = record, kind
                    if kind is RecordKind.STORED:
                        plan.similarities[sequence] = 1.0
                    break
                corrupt += 1
        return corrupt

    def _apply_policy(self, groups: Sequence[Group], nearest: NearestRecords, plan: ReusePlan) -> None:
        """Write to the plan which record serves each sequence, by the policy of its length group."""
        if self.policy.compiled:
            self.policy.compiled.choose(
                _laid_out(groups), nearest, (plan.records, plan.kinds, plan.similarities)
            )
            return
        records, similarities = nearest
        first = 0
        for index, neighbours in groupby(groups, lambda group: self.policy.group_index(group.length)):
            of_groups = [np.arange(group.first, group.first + group.count) for group in neighbours]
            sequences = np.concatenate(of_groups)
            rows = np.arange(first, first + len(sequences))
            found = {kind: similarities[kind, rows] for kind in RecordKind}
            kinds, served = self.policy.groups[index].choose(found)
            plan.kinds[sequences] = kinds
            plan.similarities[sequences] = similarities[kinds, rows]
            plan.records[sequences] = np.where(served, records[kinds, rows], -1)
            first += len(sequences)

    def _drop_corrupt(self, groups: Sequence[Group], plan: ReusePlan) -> int:
        """Remove damaged records from the plan. Returns the number of sequences that lost their record."""
        corrupt = 0
        for group in groups:
            records = plan.records[group.sequences]
            hits = np.flatnonzero(records >= 0)
            damaged = hits[~plan.segments[group.length].are_sound(records[hits])]
            if len(damaged):
                records[damaged] = -1
                corrupt += len(damaged)
        return corrupt


def _laid_out(groups: Sequence[Group]) -> np.ndarray:
    """Return groups as compiled code reads them, int64 [groups, 4]."""
    return np.array(
        [(group.first, group.count, group.first_token, group.length) for group in groups], np.int64
    )


def _set_reason(plan: ReusePlan, group: Group, marked: np.ndarray, reason: Outcome) -> None:
    """Write to the plan why the marked sequences (bool [sequences]) of a group have no record."""
    plan.reasons[group.sequences][marked[group.sequences]] = outcome_code(reason)


# θ = 1 must admit recorded sequences only, so the similarity of any other record stays below 1.
MOST_SIMILAR_OTHER = float(np.nextafter(np.float32(1), np.float32(0)))
