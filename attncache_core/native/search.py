"""Python binding of search.h: the search of records for the sequences of a batch.

    NativeStrangeness(...)          how strange sequences are, but for their lengths
    NativeSearch(...).nearest(...)  the nearest record of each kind
    NativePolicy(...).choose(...)   the record that serves each sequence

For a few sequences each of them takes some microseconds, as long as two or three calls of NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.native.attention_kernel import NUMBER_TYPES, short_calls
from attncache_core.native.memory import address
from attncache_core.native.products import PackedMatrix

KINDS = 3  # of records: kind 0 are the records of sentences, the other kinds are synthetic


class _Vectors(ctypes.Structure):
    """The structure `record_vectors` of search.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("stored", "synthetic", "kinds", "records")),
        *((name, ctypes.c_int64) for name in ("stored_count", "synthetic_count")),
    )


class _Search(ctypes.Structure):
    """The structure `search_job` of search.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first_layer", "second_layer", "vectors", "hidden", "groups")),
        *((name, ctypes.c_void_p) for name in ("features", "records", "similarities")),
        *((name, ctypes.c_int64) for name in ("group_count", "sequences", "lengths")),
        ("type", ctypes.c_int32),
    )


class _KindPolicy(ctypes.Structure):
    """The structure `kind_policy` of search.h."""

    _fields_ = (
        ("similarities", ctypes.c_void_p),
        ("damages", ctypes.c_void_p),
        ("points", ctypes.c_int64),
        ("threshold", ctypes.c_double),
    )


class _Choice(ctypes.Structure):
    """The structure `choice_job` of search.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("policies", "bounds", "groups", "records", "similarities")),
        *((name, ctypes.c_void_p) for name in ("served", "kinds", "reached")),
        *((name, ctypes.c_int64) for name in ("group_count", "sequences", "policy_count")),
    )


class _Strangeness(ctypes.Structure):
    """The structure `strangeness_job` of search.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "coefficients", "ids", "lengths", "sums")),
        *((name, ctypes.c_int64) for name in ("sequences", "vocabulary")),
    )


class RecordVectors(NamedTuple):
    """The feature vectors of the records of one length, float32 [n, dimensions] each, contiguous."""

    stored: np.ndarray  # of records of sentences, in order; empty: the caller searches them
    synthetic: np.ndarray
    kinds: np.ndarray  # int64 [synthetic], 1 or 2
    records: np.ndarray  # int64 [synthetic], the number of each record


class NativeSearch:
    """A projector and the feature vectors of all lengths, for compiled code."""

    def __init__(
        self, first_layer: PackedMatrix, second_layer: PackedMatrix, vectors: Mapping[int, RecordVectors]
    ) -> None:
        """Keep the matrices of the projector's two layers and the vectors of each length.

        first_layer: [token features, hidden]. second_layer: [dimensions, positions * token features].
        """
        self._find = first_layer.library.find_nearest
        self._dimensions = second_layer.outputs
        self._kept = first_layer, second_layer, dict(vectors)
        # Of all lengths that the projector knows, also of lengths without records.
        self._table = (_Vectors * (second_layer.inputs // first_layer.outputs + 1))()
        for length, of_length in vectors.items():
            assert of_length.stored.shape[1] == of_length.synthetic.shape[1] == self._dimensions
            self._table[length] = _Vectors(
                *map(address, of_length), len(of_length.stored), len(of_length.synthetic)
            )
        self._job = _Search(
            first_layer=ctypes.addressof(first_layer.matrix),
            second_layer=ctypes.addressof(second_layer.matrix),
            vectors=ctypes.addressof(self._table),
            lengths=len(self._table),
        )

    def nearest(self, hidden: torch.Tensor, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what a search finds for the sequences of these groups, group after group.

        hidden: [tokens, hidden] of the whole batch, on the CPU. groups: int64 [groups, 4], as the fields of
        `search_group`. Returns the features, float32 [sequences, dimensions], the number of the nearest
        record of each kind, int64 [kinds, sequences], -1 if there is none, and the similarity of this
        record, float32 [kinds, sequences], -inf if there is none. Raises IndexError if a sequence is longer
        than the projector's sequences.
        """
        hidden = hidden.contiguous()
        sequences = int(groups[:, 1].sum())
        features = np.empty((sequences, self._dimensions), np.float32)
        records = np.empty((KINDS, sequences), np.int64)
        similarities = np.empty((KINDS, sequences), np.float32)
        job = _Search.from_buffer_copy(self._job)
        job.hidden, job.type = hidden.data_ptr(), NUMBER_TYPES[hidden.dtype]
        job.groups, job.group_count, job.sequences = address(groups), len(groups), sequences
        job.features, job.records = address(features), address(records)
        job.similarities = address(similarities)
        if self._find(ctypes.addressof(job)):
            raise IndexError("a sequence is longer than the projector's sequences")
        return features, records, similarities


# When records of one kind may serve: the fields of KindPolicy of reuse/maps/policy.py.
KindCurve = tuple[float, Sequence[float], Sequence[float]]


class NativePolicy:
    """The thresholds and curves of all length groups, for compiled code."""

    def __init__(
        self, library: ctypes.CDLL, bounds: Sequence[int], groups: Sequence[Sequence[KindCurve]]
    ) -> None:
        """bounds: the longest sequence of each length group but the last. groups: their kinds, in order."""
        self._choose = short_calls(library).choose_records
        self._bounds = np.array(bounds, np.int64)
        self._policies = (_KindPolicy * (KINDS * len(groups)))()
        self._kept = []
        for at, (threshold, *curve) in enumerate(curve for kinds in groups for curve in kinds):
            points = np.array(curve, np.float64)
            self._kept.append(points)
            first, count = address(points), points.shape[1]
            self._policies[at] = _KindPolicy(first, first + 8 * count, count, threshold)
        self._job = _Choice(
            policies=ctypes.addressof(self._policies), bounds=address(self._bounds), policy_count=len(groups)
        )

    def choose(
        self,
        groups: np.ndarray,
        nearest: tuple[np.ndarray, np.ndarray],
        chosen: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Write which record serves each sequence of some groups.

        groups, nearest: groups, records and similarities as of NativeSearch.nearest. chosen: by packed
        sequence, the record that serves, int64, or -1; the chosen kind, int64; and its similarity, float32.
        """
        records, similarities = nearest
        served, kinds, reached = chosen
        job = _Choice.from_buffer_copy(self._job)
        job.groups, job.group_count = address(groups), len(groups)
        job.records, job.similarities, job.sequences = (
            address(records),
            address(similarities),
            records.shape[1],
        )
        job.served, job.kinds, job.reached = address(served), address(kinds), address(reached)
        self._choose(ctypes.addressof(job))


class NativeStrangeness:
    """The linear model of strangeness, for compiled code; see reuse/maps/familiarity.py."""

    def __init__(self, library: ctypes.CDLL, weights: np.ndarray, coefficients: np.ndarray) -> None:
        """weights: float32 [vocabulary]. coefficients: float32 [8]."""
        self._measure = short_calls(library).measure_strangeness
        self._kept = np.ascontiguousarray(weights), np.ascontiguousarray(coefficients)
        self._job = _Strangeness(*map(address, self._kept), vocabulary=len(weights))

    def __call__(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return coefficients @ statistics of each sequence, without the logarithm, float32 [sequences].

        ids: int64 [tokens]. lengths: int64 [sequences]. Raises IndexError if a token has no weight.
        """
        sums = np.empty(len(lengths), np.float32)
        job = _Strangeness.from_buffer_copy(self._job)
        job.ids, job.lengths, job.sums = address(ids), address(lengths), address(sums)
        job.sequences = len(lengths)
        if self._measure(ctypes.addressof(job)):
            raise IndexError("a token id is not in the vocabulary of the familiarity test")
        return sums
