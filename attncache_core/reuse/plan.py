"""Reuse plans: which parts of a batch are computed and which are reused, as data.

    tokens -> ReuseStrategy.plan -> ReusePlan -> (ReuseStrategy.refine, with hidden states) -> ReusePlan
           -> engine/layers.py runs the layers that the plan covers

A plan holds arrays and record numbers, and no behaviour, so the layer loop can execute the plan of any
strategy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Self

import numpy as np

from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.segment import Segment

# The value of `ReusePlan.until` of a plan that covers all layers.
ALL_LAYERS = sys.maxsize


class Outcome(StrEnum):
    """The result of planning for one sequence. Each sequence has exactly one outcome."""

    HIT = "hit"  # the reused heads take the maps of a recorded sentence
    PROTOTYPE_HIT = "prototype_hit"  # the reused heads take the maps of a synthetic record
    MISS = "miss"  # searched, and no record was near enough
    NOT_SEARCHED = "not_searched"  # reuse was declined, or no record of this length exists
    UNFAMILIAR = "unfamiliar"  # not searched: the text does not resemble the texts the budget was measured on
    COLD = "cold"  # the maps of its record are not in memory, and take longer to read than a hit saves
    # The value is the label of a metric, which keeps its name.
    SKIPPED_BY_COST = "cannot_pay"  # not searched: reuse saves too little time at this length

    @property
    def is_hit(self) -> bool:
        """Whether maps of a record of any kind were reused."""
        return self in _HITS.values()


_ALL = list(Outcome)
_BY_CODE = np.array(_ALL, dtype=object)
_HITS = {
    RecordKind.STORED: Outcome.HIT,
    RecordKind.PROTOTYPE: Outcome.PROTOTYPE_HIT,
    RecordKind.MEAN: Outcome.PROTOTYPE_HIT,
}
_NOT_SEARCHED, _MISS = map(_ALL.index, (Outcome.NOT_SEARCHED, Outcome.MISS))
_HIT_CODES = np.array([_ALL.index(_HITS[kind]) for kind in RecordKind])  # by RecordKind


@dataclass(frozen=True)
class ReusePlan:
    """The maps that a batch reuses. All arrays are in the packed order of the batch.

    A sequence with a record takes the maps of the reuse mask's heads from the record. Every other map is
    computed.
    """

    records: np.ndarray  # int64 [sequences], index of the record in the segment of its length; -1: no record
    kinds: np.ndarray  # int64 [sequences], RecordKind of each record
    similarities: np.ndarray  # float32 [sequences], nan if the sequence was not compared with records
    reasons: np.ndarray  # int64 [sequences], outcome_code for each sequence without a record
    strangeness: np.ndarray  # float32 [sequences], nan if not computed; see maps/familiarity.py
    segments: Mapping[int, Segment] = field(default_factory=dict)  # length -> segment with its records
    until: int = ALL_LAYERS  # number of the first layer that the plan does not cover
    corrupt_records: int = 0  # number of records that were found damaged and are not used

    @property
    def hits(self) -> np.ndarray:
        """Whether each sequence takes maps from a record, bool [sequences]."""
        return self.records >= 0

    @property
    def self_hits(self) -> np.ndarray:
        """Whether each sequence takes its own maps, from a record of the same tokens, bool [sequences]."""
        return self.hits & (self.kinds == RecordKind.STORED) & (self.similarities >= 1)

    def outcomes(self) -> np.ndarray:
        """Return the Outcome of each sequence, object [sequences]."""
        # Outcomes are handled as codes, because NumPy turns members of a StrEnum into plain strings when they
        # are assigned to an array.
        compared = ~np.isnan(self.similarities)
        codes = np.where(compared & (self.reasons == _NOT_SEARCHED), _MISS, self.reasons)
        return outcomes_of(np.where(self.hits, _HIT_CODES[self.kinds], codes))

    def reordered(self, permutation: np.ndarray) -> Self:
        """Return the plan for the batch with its packed sequences permuted: sequence permutation[i] at i."""
        arrays = {part.name: getattr(self, part.name) for part in fields(self)}
        return replace(
            self,
            **{name: rows[permutation] for name, rows in arrays.items() if isinstance(rows, np.ndarray)},
        )


def outcome_code(outcome: Outcome) -> int:
    """Return the code of an outcome in `ReusePlan.reasons`."""
    return _ALL.index(outcome)


def outcomes_of(codes: np.ndarray) -> np.ndarray:
    """Return the outcomes with these codes (int [n]), object [n]."""
    return _BY_CODE[codes]


def no_reuse(sequences: int) -> ReusePlan:
    """Return a new plan that computes everything for this number of sequences."""
    shared = shared_no_reuse(sequences)
    return ReusePlan(
        shared.records.copy(),
        shared.kinds.copy(),
        shared.similarities.copy(),
        shared.reasons.copy(),
        shared.strangeness.copy(),
    )


@lru_cache(maxsize=64)
def shared_no_reuse(sequences: int) -> ReusePlan:
    """Return the plan of `no_reuse`, the same for all callers. Its arrays are read-only."""
    arrays = (
        np.full(sequences, -1),
        np.full(sequences, RecordKind.STORED, dtype=np.int64),
        np.full(sequences, np.nan, dtype=np.float32),
        np.full(sequences, _NOT_SEARCHED),
        np.full(sequences, np.nan, dtype=np.float32),
    )
    for rows in arrays:
        rows.flags.writeable = False
    return ReusePlan(*arrays)
