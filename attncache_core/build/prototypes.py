"""Cluster the sequences of one length, and average the maps of each cluster into a synthetic record."""

from __future__ import annotations

from collections.abc import Sequence

import faiss
import numpy as np
import torch

# The mean of fewer maps is as unusual as single maps are.
_MIN_MEMBERS = 8
_KMEANS_ITERATIONS = 15


def clusters(inputs: np.ndarray, max_clusters: int) -> np.ndarray:
    """Assign each of n sequences of one length to a cluster by k-means, and return the clusters, int64 [n].

    inputs: float32 [n, d]. max_clusters: the maximum number of clusters. Clusters have at least eight members
    on average, so few sequences are one cluster. Clusters are numbered from 0 without gaps.
    """
    count = min(max_clusters, max(1, len(inputs) // _MIN_MEMBERS))
    if count == 1:
        return np.zeros(len(inputs), dtype=np.int64)
    kmeans = faiss.Kmeans(inputs.shape[1], count, niter=_KMEANS_ITERATIONS, seed=0, min_points_per_centroid=1)
    kmeans.train(np.ascontiguousarray(inputs))
    _, nearest = kmeans.index.search(inputs, 1)
    return np.unique(nearest[:, 0], return_inverse=True)[1]


class MeanMaps:
    """The sums of the maps of each cluster's members, from which means are computed."""

    def __init__(self) -> None:
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._members: dict[int, int] = {}

    def add(self, cluster: int, maps: Sequence[torch.Tensor]) -> None:
        """Add a member to a cluster. maps: for each layer [stored heads, L, L]."""
        sums = self._sums.setdefault(cluster, [torch.zeros(layer.shape) for layer in maps])
        for total, layer in zip(sums, maps, strict=True):
            total += layer
        self._members[cluster] = self._members.get(cluster, 0) + 1

    def of(self, clusters: Sequence[int]) -> list[torch.Tensor]:
        """Return the mean maps of all members of these clusters, per layer float32 [stored heads, L, L]."""
        members = sum(self._members[cluster] for cluster in clusters)
        layers = zip(*(self._sums[cluster] for cluster in clusters), strict=True)
        return [torch.stack(sums).sum(dim=0) / members for sums in layers]
