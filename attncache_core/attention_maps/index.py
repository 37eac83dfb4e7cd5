"""The nearest record of a feature vector, among the records of exactly its length.

A map is L x L, so a record of another length can never serve: each length is a partition of its own.
Small partitions are searched exactly. In large ones every vector is first compared in four bits for each pair
of its numbers, and the nearest by these are compared exactly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import faiss
import numpy as np

from attncache_core.errors import BuildFailed, CorruptDatabase

# Measured with 128 dimensions: 1 to 64 queries are answered sooner by an exact scan up to about this many
# vectors; above, by compressed vectors.
EXACT_BELOW = 4096
# How many of the nearest by compressed vectors are compared exactly. Measured with 100,000 vectors, as
# milliseconds of 64 queries on two threads and recall@1: random vectors 3.3, 0.998; features of English
# sentences 3.0, 1.000; of sentences from templates 2.9, 0.991. With 128: 2.6, 0.993; 2.4, 0.998; 2.3, 0.979.
# HNSW (32 neighbours, breadth 80 and 64): 5, 0.67; 3.3, 0.89; 1.3, 0.996. It does not find up to 13 in 100
# recorded vectors by themselves, takes five to twenty times as long to build and half as much memory again.
_COMPARED_EXACTLY = 256
_FAR_AWAY = 1e6


def index_path(folder: Path, length: int) -> Path:
    """The index file of sequences of `length` tokens in the database `folder`."""
    return folder / "index" / f"{length:05d}.faiss"


def nearest_in(index: faiss.Index, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As FeatureIndex.nearest, of one index of vectors."""
    _, found = index.search(features, 1)
    records = found[:, 0]
    # Faiss' own squared distances come from |a|² + |b|² - 2ab in batches: near zero nothing of them is left,
    # and they would depend on the batch. The distance of the one found is taken anew. Where Faiss finds none
    # it says -1, and would read the vector that stands before the first.
    nearest = index.reconstruct_batch(np.maximum(records, 0))
    return records, np.linalg.norm(nearest - features, axis=1)


class FeatureIndex:
    """Feature vectors by length; the number of a vector in its partition is its record's in its segment."""

    def __init__(self) -> None:
        self._partitions: dict[int, faiss.Index] = {}

    def add(self, length: int, features: np.ndarray, exact_below: int = EXACT_BELOW) -> None:
        """A new partition for `length` of features float32 [records, dimensions].

        From `exact_below` records on, which must be at least 16, it is searched by compressed vectors.
        """
        vectors = np.ascontiguousarray(features, dtype=np.float32)
        records, dimensions = vectors.shape
        if records < exact_below:
            partition: faiss.Index = faiss.IndexFlatL2(dimensions)
        else:
            codes = dimensions // math.gcd(dimensions, 2)
            partition = faiss.IndexRefineFlat(faiss.IndexPQFastScan(dimensions, codes, 4))
            partition.k_factor = _COMPARED_EXACTLY
            partition.train(vectors)
        partition.add(vectors)
        self._partitions[length] = partition

    def is_exact(self, length: int) -> bool:
        """Whether the partition of `length` is searched exactly."""
        return isinstance(self._partitions[length], faiss.IndexFlat)

    def __contains__(self, length: int) -> bool:
        """Whether there are records of this length."""
        return length in self._partitions

    def size(self, length: int) -> int:
        """Records of this length."""
        return int(self._partitions[length].ntotal)

    def dimensions(self, length: int) -> int:
        """Numbers of the feature vectors of this length."""
        return int(self._partitions[length].d)

    def nearest(self, length: int, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each feature vector [n, dimensions] its nearest record and the L2 distance to it.

        Returns (records int64 [n], distances float32 [n]). Where features are not finite, neither is the
        distance, and the record may be -1.
        """
        return nearest_in(self._partitions[length], features)

    def without(self, records: Mapping[int, Collection[int]]) -> FeatureIndex:
        """An index that never finds these records (length -> numbers); the others keep their numbers."""
        index = FeatureIndex()
        index._partitions = dict(self._partitions)
        for length, gone in records.items():
            vectors = self._partitions[length].reconstruct_n(0, self.size(length))
            # So far away that no threshold lets them serve.
            vectors[list(gone)] = _FAR_AWAY
            index.add(length, vectors, exact_below=len(vectors) + 1)
        return index

    def write(self, folder: Path) -> list[Path]:
        """The partitions as files under `folder`; returns their paths."""
        paths = []
        for length, partition in self._partitions.items():
            path = index_path(folder, length)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                faiss.write_index(partition, str(path))
            except RuntimeError as error:
                raise BuildFailed(
                    f"{path} cannot be written: the disk is full or the folder read-only", field="database"
                ) from error
            paths.append(path)
        return paths

    @classmethod
    def read(cls, folder: Path, lengths: list[int]) -> FeatureIndex:
        """The index that `write` left under `folder`. The files' checksums are the caller's to check."""
        index = cls()
        for length in lengths:
            try:
                index._partitions[length] = faiss.read_index(str(index_path(folder, length)))
            except RuntimeError as error:
                raise CorruptDatabase(f"{index_path(folder, length)} cannot be read") from error
        return index
