"""Find the nearest recorded sentence of a feature vector, among the sentences of the same length.

A map is L x L, so a record of another length cannot serve, and each length has its own partition. Small
partitions are searched exactly. In large partitions, all vectors are first compared in compressed form (four
bits per pair of numbers), and then the nearest of them are compared exactly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import faiss
import numpy as np

from attncache_core.errors import BuildFailed, CorruptDatabase

# Measured with 128 dimensions and 1 to 64 queries: an exact scan is faster up to about this many vectors,
# a search of compressed vectors is faster above.
EXACT_BELOW = 4096
# Number of the nearest compressed vectors that are compared exactly. Measured with 100,000 vectors, as
# milliseconds of 64 queries on two threads and recall@1: random vectors 3.3, 0.998; features of English
# sentences 3.0, 1.000; of sentences from templates 2.9, 0.991. With 128: 2.6, 0.993; 2.4, 0.998; 2.3, 0.979.
# HNSW (32 neighbours, breadth 80 and 64): 5, 0.67; 3.3, 0.89; 1.3, 0.996. With HNSW, up to 13 in 100 recorded
# vectors do not find themselves, the build takes five to twenty times as long, and memory grows by half.
_COMPARED_EXACTLY = 256
_FAR_AWAY = 1e6  # a coordinate so large that no threshold lets its record serve


def index_path(folder: Path, length: int) -> Path:
    """Return the path of the index file for sequences of `length` tokens in the database `folder`."""
    return folder / "index" / f"{length:05d}.faiss"


def nearest_in(index: faiss.Index, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest vector in one Faiss index; arguments and result as in FeatureIndex.nearest."""
    _, found = index.search(features, 1)
    records = found[:, 0]
    # Faiss computes squared distances in batches as |a|² + |b|² - 2ab, which loses all digits near zero and
    # depends on the batch, so the distance of the nearest vector is computed again. If Faiss finds no vector,
    # the index is -1, which `reconstruct_batch` would read from before the first vector.
    nearest = index.reconstruct_batch(np.maximum(records, 0))
    return records, np.linalg.norm(nearest - features, axis=1)


class FeatureIndex:
    """Feature vectors, partitioned by length.

    Vector i of a partition belongs to record i of the segment with the same length.
    """

    def __init__(self) -> None:
        self._partitions: dict[int, faiss.Index] = {}

    def add(self, length: int, features: np.ndarray, exact_below: int = EXACT_BELOW) -> None:
        """Add a partition for `length` with the features of all its records, float32 [records, dimensions].

        A partition of `exact_below` or more records is searched in compressed form. `exact_below` must be at
        least 16.
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

    def __contains__(self, length: int) -> bool:
        """Return whether there is a partition for this length."""
        return length in self._partitions

    @property
    def is_empty(self) -> bool:
        """Whether there is no partition, because no record is of a sentence."""
        return not self._partitions

    @property
    def lengths(self) -> list[int]:
        """The lengths that have a partition."""
        return list(self._partitions)

    def size(self, length: int) -> int:
        """Return the number of records of this length."""
        return int(self._partitions[length].ntotal)

    def dimensions(self, length: int) -> int:
        """Return the number of elements of the feature vectors of this length."""
        return int(self._partitions[length].d)

    def nearest(self, length: int, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the nearest record of each feature vector [n, dimensions], and the L2 distance to it.

        Returns (records int64 [n], distances float32 [n]). If features are not finite, the distance is not
        finite either, and the record may be -1.
        """
        return nearest_in(self._partitions[length], features)

    def vectors(self, length: int) -> np.ndarray | None:
        """Return the vectors of a partition, float32 [records, dimensions], a view on this index.

        None if there is no partition, or if it is searched in compressed form.
        """
        partition = self._partitions.get(length)
        if not isinstance(partition, faiss.IndexFlat):
            return None
        found: np.ndarray = faiss.rev_swig_ptr(partition.get_xb(), partition.ntotal * partition.d)
        return found.reshape(partition.ntotal, partition.d)

    def is_compressed(self, length: int) -> bool:
        """Return whether there is a partition of this length that is searched in compressed form."""
        return length in self._partitions and not isinstance(self._partitions[length], faiss.IndexFlat)

    def without(self, records: Mapping[int, Collection[int]]) -> FeatureIndex:
        """Return an index in which no search finds these records (length -> records)."""
        index = FeatureIndex()
        index._partitions = dict(self._partitions)
        for length, excluded in records.items():
            vectors = self._partitions[length].reconstruct_n(0, self.size(length))
            # Excluded vectors move instead of being removed, because the other vectors must keep their index.
            vectors[list(excluded)] = _FAR_AWAY
            index.add(length, vectors, exact_below=len(vectors) + 1)
        return index

    def write(self, folder: Path) -> list[Path]:
        """Write each partition to a file under `folder`. Returns the paths. Raises BuildFailed."""
        paths = []
        for length, partition in self._partitions.items():
            path = index_path(folder, length)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # Faiss would encode the name in UTF-8, whatever the encoding of file names is.
                with path.open("wb") as file:
                    writer = faiss.PyCallbackIOWriter(file.write)  # type: ignore[attr-defined]
                    faiss.write_index(partition, writer)
            except (OSError, RuntimeError) as error:
                raise BuildFailed(
                    f"{path} cannot be written: the disk is full or the folder read-only", field="database"
                ) from error
            paths.append(path)
        return paths

    @classmethod
    def read(cls, folder: Path, lengths: list[int]) -> FeatureIndex:
        """Read the partitions of these lengths from `folder`. Raises CorruptDatabase.

        The caller must check the digests of the files first.
        """
        index = cls()
        for length in lengths:
            path = index_path(folder, length)
            try:
                with path.open("rb") as file:
                    reader = faiss.PyCallbackIOReader(file.read)  # type: ignore[attr-defined]
                    index._partitions[length] = faiss.read_index(reader)
            except (OSError, RuntimeError) as error:
                raise CorruptDatabase(f"{path} cannot be read") from error
        return index
