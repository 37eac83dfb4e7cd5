"""Find the nearest synthetic record of a feature vector.

The maps of a synthetic record are the mean of the maps of many sentences, so the record fits diverse text
better than the record of a single sentence. Each length has one mean of all its sentences, and may have a few
prototypes, each the mean of a cluster of sentences. There are few synthetic records, so one index holds all
lengths, and one matrix product compares a whole batch with the records of its lengths. build/recording.py
makes the clusters and the means.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.maps.index import distances_between
from attncache_core.reuse.storage.layout import RecordKind


def prototypes_path(folder: Path) -> Path:
    """Return the path of the file with the index of synthetic records in the database `folder`."""
    return folder / "prototypes.safetensors"


@dataclass(frozen=True)
class PrototypeIndex:
    """The feature vectors of all synthetic records, in ascending order of length.

    The feature vector of a synthetic record is the mean of the feature vectors of its sentences.
    """

    features: np.ndarray  # float32 [records, d]
    lengths: np.ndarray  # int64 [records], tokens
    records: np.ndarray  # int64 [records], index of each record in the segment of its length
    kinds: np.ndarray  # int64 [records], RecordKind.MEAN once per length, or RecordKind.PROTOTYPE

    @cached_property
    def means(self) -> dict[int, int]:
        """The mean record of each length: length -> index of the record in its segment."""
        rows = np.flatnonzero(self.kinds == RecordKind.MEAN)
        return dict(zip(self.lengths[rows].tolist(), self.records[rows].tolist(), strict=True))

    def __contains__(self, length: int) -> bool:
        """Return whether there are synthetic records of this length."""
        return length in self.means

    def counts(self) -> dict[int, int]:
        """Return the number of synthetic records of each length: length -> records."""
        lengths, counts = np.unique(self.lengths, return_counts=True)
        return dict(zip(lengths.tolist(), counts.tolist(), strict=True))

    def of_length(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return features, kinds and records of the synthetic records of one length, as views."""
        first, end = np.searchsorted(self.lengths, (length, length + 1)).tolist()
        return self.features[first:end], self.kinds[first:end], self.records[first:end]

    def nearest(
        self, kind: RecordKind, lengths: np.ndarray, features: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the nearest record of this kind for sequences with these lengths [n] and features [n, d].

        Returns (records int64 [n], distances float32 [n]); -1 and infinity if the length has no such record.
        """
        part = self._parts[kind]
        first = end = 0
        if len(lengths):
            first, end = np.searchsorted(part.lengths, (lengths.min(), lengths.max() + 1)).tolist()
        if first == end:
            return np.full(len(lengths), -1), np.full(len(lengths), np.inf, dtype=np.float32)
        rows = np.full(len(lengths), first)
        if end - first > 1:
            columns = slice(first, end)
            scores = torch.addmm(
                part.squares[columns], torch.from_numpy(features), part.transposed[:, columns], alpha=-2.0
            ).numpy()
            scores[lengths[:, None] != part.lengths[columns]] = np.inf
            rows += scores.argmin(axis=1)
        # The distance is computed again, because the scores depend on the batch by rounding.
        distances = distances_between(features, part.features[rows])
        known = part.lengths[rows] == lengths
        return np.where(known, part.records[rows], -1), np.where(known, distances, np.inf)

    @cached_property
    def _parts(self) -> dict[RecordKind, _Part]:
        rows_of = {kind: np.flatnonzero(self.kinds == kind) for kind in RecordKind}
        return {
            kind: _Part.of(self.features[rows], self.lengths[rows], self.records[rows])
            for kind, rows in rows_of.items()
        }

    def to_bytes(self) -> bytes:
        """Return the index as the content of a safetensors file."""
        return save(asdict(self))

    @classmethod
    def load(cls, path: Path) -> PrototypeIndex:
        """Load an index from a file with the content of `to_bytes`. Raises CorruptDatabase."""
        try:
            index = cls(**load_file(path))
            rows, _ = index.features.shape
            if any(column.shape != (rows,) for column in (index.lengths, index.records, index.kinds)):
                raise ValueError("each feature vector needs one length, one record and one kind")
            if not np.isin(index.kinds, (RecordKind.PROTOTYPE, RecordKind.MEAN)).all():
                raise ValueError("a record of an index of synthetic records is not synthetic")
            return index
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise CorruptDatabase(f"{path} cannot be read", field="database") from error


@dataclass(frozen=True)
class _Part:
    """The records of one kind, prepared for comparison with features f by |p|² - 2 f·p.

    This score ranks records p like the squared distance |f - p|², because |f|² is the same for all records.
    """

    features: np.ndarray  # float32 [records, d]
    lengths: np.ndarray  # int64 [records]
    records: np.ndarray  # int64 [records]
    transposed: torch.Tensor  # float32 [d, records]
    squares: torch.Tensor  # float32 [records], |p|²

    @classmethod
    def of(cls, features: np.ndarray, lengths: np.ndarray, records: np.ndarray) -> _Part:
        transposed = torch.from_numpy(features).T
        return cls(features, lengths, records, transposed, transposed.square().sum(dim=0))
