"""Prototypes: synthetic records whose maps are the mean of many, and the search for the nearest of them.

A prototype fits no sentence as its own record would, but diverse text better than any one sentence's. Each
length has few, the mean of all among them, and a batch asks for all its lengths at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import faiss
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from attncache_core.attention_maps.store import RecordKind
from attncache_core.errors import CorruptDatabase

# A mean of fewer maps is as odd as its members.
_FEWEST_MEMBERS = 8
_ROUNDS = 15


def prototypes_path(folder: Path) -> Path:
    """The file of the prototypes' features in the database `folder`."""
    return folder / "prototypes.safetensors"


def clusters(inputs: np.ndarray, most: int) -> np.ndarray:
    """The cluster of each of n sequences of one length, int64 [n], from their inputs float32 [n, d].

    At most `most` clusters of at least eight members on average; one where there are few sequences.
    """
    count = min(most, max(1, len(inputs) // _FEWEST_MEMBERS))
    if count == 1:
        return np.zeros(len(inputs), dtype=np.int64)
    kmeans = faiss.Kmeans(inputs.shape[1], count, niter=_ROUNDS, seed=0, min_points_per_centroid=1)
    kmeans.train(np.ascontiguousarray(inputs))
    _, nearest = kmeans.index.search(inputs, 1)
    return np.unique(nearest[:, 0], return_inverse=True)[1]


class MeanMaps:
    """Adds up the maps of the members of each cluster."""

    def __init__(self) -> None:
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._members: dict[int, int] = {}

    def add(self, cluster: int, maps: Sequence[torch.Tensor]) -> None:
        """A member: for each layer its maps [stored heads, L, L]."""
        sums = self._sums.setdefault(cluster, [torch.zeros(layer.shape) for layer in maps])
        for total, layer in zip(sums, maps, strict=True):
            total += layer
        self._members[cluster] = self._members.get(cluster, 0) + 1

    def of(self, clusters: Sequence[int]) -> list[torch.Tensor]:
        """The mean maps of all members of these clusters, float32."""
        members = sum(self._members[cluster] for cluster in clusters)
        layers = zip(*(self._sums[cluster] for cluster in clusters), strict=True)
        return [torch.stack(sums).sum(dim=0) / members for sums in layers]


@dataclass(frozen=True)
class PrototypeIndex:
    """The feature vectors of all synthetic records, lengths rising; each is the mean of its members'."""

    features: np.ndarray  # float32 [records, d]
    lengths: np.ndarray  # int64 [records]
    records: np.ndarray  # int64 [records], numbers within the segments of their lengths
    kinds: np.ndarray  # int64 [records], RecordKind.MEAN once for each length, or PROTOTYPE

    @cached_property
    def means(self) -> dict[int, int]:
        """Length -> the record that is the mean of all of that length."""
        rows = np.flatnonzero(self.kinds == RecordKind.MEAN)
        return dict(zip(self.lengths[rows].tolist(), self.records[rows].tolist(), strict=True))

    def __contains__(self, length: int) -> bool:
        """Whether there are synthetic records of this length."""
        return length in self.means

    def counts(self) -> dict[int, int]:
        """Length -> synthetic records."""
        lengths, counts = np.unique(self.lengths, return_counts=True)
        return dict(zip(lengths.tolist(), counts.tolist(), strict=True))

    def nearest(
        self, kind: RecordKind, lengths: np.ndarray, features: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """For sequences of these lengths [n] with these features [n, d] the nearest record of this kind.

        Returns (records int64 [n], -1 for none; distances float32 [n], infinite for none).
        """
        part = self._parts[kind]
        if not len(part.lengths):
            return np.full(len(lengths), -1), np.full(len(lengths), np.inf, dtype=np.float32)
        scores = torch.addmm(part.squares, torch.from_numpy(features), part.transposed, alpha=-2.0).numpy()
        scores[lengths[:, None] != part.lengths] = np.inf
        places = scores.argmin(axis=1)
        # Taken anew, so that it does not depend on the batch.
        distances = np.linalg.norm(features - part.features[places], axis=1)
        known = part.lengths[places] == lengths
        return np.where(known, part.records[places], -1), np.where(known, distances, np.inf)

    @cached_property
    def _parts(self) -> dict[RecordKind, _Part]:
        rows = {kind: np.flatnonzero(self.kinds == kind) for kind in RecordKind}
        return {
            kind: _Part.of(self.features[places], self.lengths[places], self.records[places])
            for kind, places in rows.items()
        }

    def to_bytes(self) -> bytes:
        """The index as the content of a safetensors file."""
        return save(asdict(self))

    @classmethod
    def load(cls, path: Path) -> PrototypeIndex:
        """The index whose `to_bytes` is in the file. Raises CorruptDatabase."""
        try:
            index = cls(**load_file(path))
            rows, _ = index.features.shape
            if any(column.shape != (rows,) for column in (index.lengths, index.records, index.kinds)):
                raise ValueError("not one length, record and kind for each feature vector")
            return index
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise CorruptDatabase(f"{path} cannot be read", field="database") from error


@dataclass(frozen=True)
class _Part:
    """The records of one kind, ready to be compared: |p|² - 2 f·p is the squared distance but for |f|²."""

    features: np.ndarray
    lengths: np.ndarray
    records: np.ndarray
    transposed: torch.Tensor  # [d, records]
    squares: torch.Tensor  # [records]

    @classmethod
    def of(cls, features: np.ndarray, lengths: np.ndarray, records: np.ndarray) -> _Part:
        transposed = torch.from_numpy(features).T
        return cls(features, lengths, records, transposed, transposed.square().sum(dim=0))
