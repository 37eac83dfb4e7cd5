"""Find the nearest synthetic record of a feature vector.

The maps of a synthetic record are the mean of the maps of many sentences, so the record fits diverse text
better than the record of a single sentence. Each length has one mean of all its sentences, and may have a few
prototypes, each the mean of a cluster of sentences. There are few synthetic records, so one index holds all
lengths. build/recording.py makes the clusters and the means.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from attncache_core.errors import CorruptDatabase
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

    def nearest(self, kind: RecordKind, length: int, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the nearest record of this kind and length for features [n, d].

        Returns (records int64 [n], distances float32 [n]); -1 and infinity if the length has no such record.
        """
        vectors, kinds, records = self.of_length(length)
        (rows,) = np.nonzero(kinds == kind)
        if not len(rows):
            return np.full(len(features), -1), np.full(len(features), np.inf, dtype=np.float32)
        distances = np.linalg.norm(features[:, None] - vectors[rows], axis=2)  # [n, records of the kind]
        return records[rows[distances.argmin(axis=1)]], distances.min(axis=1)

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
