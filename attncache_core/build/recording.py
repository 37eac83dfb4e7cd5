"""Write the segments of a new database: the maps of every sentence, and the prototypes of each length.

Prototypes are the means of clusters of sequences.

A segment holds the records of one length in this order: training sentences, held-out sentences, the mean of
the length, its prototypes. A database of synthetic records gets segments with the last two kinds alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import faiss
import numpy as np
import torch

from attncache_core.build.sentences import FirstInputs, Sentences, require_finite
from attncache_core.calibration.substitution import token_passes, traced_forward
from attncache_core.models import PackedModel
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.maps.prototypes import PrototypeIndex
from attncache_core.reuse.mask import head_order
from attncache_core.reuse.storage.layout import MapForm, RecordKind, RecordLayout, segment_path
from attncache_core.reuse.storage.seal import Seal
from attncache_core.reuse.storage.segment import Segment
from attncache_core.reuse.storage.segment_file import SegmentWriter, is_finished
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.text.token_batch import pack

# The mean of fewer maps is as unusual as single maps are.
_MIN_MEMBERS = 8
_KMEANS_ITERATIONS = 15


def clusters(inputs: np.ndarray, max_clusters: int, *, merge_small: bool = False) -> np.ndarray:
    """Assign each of n sequences of one length to a cluster by k-means, and return the clusters, int64 [n].

    inputs: float32 [n, d]. max_clusters: the maximum number of clusters. Clusters have at least eight members
    on average, so few sequences are one cluster. Clusters are numbered from 0 without gaps. merge_small: the
    members of a cluster with fewer than eight members join the nearest of the other clusters.
    """
    count = min(max_clusters, max(1, len(inputs) // _MIN_MEMBERS))
    if count == 1:
        return np.zeros(len(inputs), dtype=np.int64)
    kmeans = faiss.Kmeans(inputs.shape[1], count, niter=_KMEANS_ITERATIONS, seed=0, min_points_per_centroid=1)
    kmeans.train(np.ascontiguousarray(inputs))
    _, nearest = kmeans.index.search(inputs, 1)
    assigned = nearest[:, 0]
    if merge_small:
        large = np.flatnonzero(np.bincount(assigned, minlength=count) >= _MIN_MEMBERS)
        assert kmeans.centroids is not None
        centres = faiss.IndexFlatL2(inputs.shape[1])
        centres.add(kmeans.centroids[large])
        assigned = large[centres.search(inputs, 1)[1][:, 0]]
    return np.unique(assigned, return_inverse=True)[1]


class MeanMaps:
    """The sums of the maps of each cluster's members, from which means are computed."""

    def __init__(self) -> None:
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._members: dict[int, int] = {}

    def add(self, cluster: int, maps: Sequence[torch.Tensor]) -> None:
        """Add a member to a cluster. maps: for each layer [stored heads, L, L]."""
        sums = self._sums.setdefault(
            cluster, [torch.zeros(layer.shape, dtype=torch.float32) for layer in maps]
        )
        for total, layer in zip(sums, maps, strict=True):
            total += layer
        self._members[cluster] = self._members.get(cluster, 0) + 1

    def of(self, clusters: Sequence[int]) -> list[torch.Tensor]:
        """Return the mean maps of all members of these clusters, per layer float32 [stored heads, L, L]."""
        members = sum(self._members[cluster] for cluster in clusters)
        layers = zip(*(self._sums[cluster] for cluster in clusters), strict=True)
        return [torch.stack(sums).sum(dim=0) / members for sums in layers]


# If a length has fewer training sentences, longer sentences are cut to it to compute its prototypes.
_ENOUGH_MEMBERS = 128
_SEQUENCES_PER_PASS = 256


def smallest_form(model: PackedModel) -> MapForm:
    """Return the smallest form that holds a model's maps: packed for causal models.

    The upper triangles of causal maps are zero.
    """
    causal = all(layer.attention_mask.is_causal for layer in model.layers)
    return MapForm.PACKED if causal else MapForm.SQUARE


class Recording:
    """The records of each length, in order: training sentences, held-out sentences, synthetic records.

    Synthetic records are means of training sentences only, so that held-out sentences can measure them. A
    length without a sentence, below the longest length, has synthetic records of longer sentences that were
    cut to the length.

    With `synthetic_only`, the records of sentences are written for the build alone, and the segments of the
    database hold only synthetic records. Each synthetic record is then the mean of at least eight sentences,
    and the mean of a length is the mean of its prototypes, so that no difference of records shows a sentence.
    """

    def __init__(
        self,
        model: PackedModel,
        sentences: Sentences,
        layout: RecordLayout,
        prototypes: int,
        seal: Seal,
        first_inputs: FirstInputs,
        *,
        synthetic_only: bool = False,
    ) -> None:
        """prototypes: the maximum number of prototypes per length; 0: no synthetic records."""
        self._model, self._sentences, self.layout, self._seal = model, sentences, layout, seal
        self._first_inputs = first_inputs
        self._max_prototypes, self._synthetic_only = prototypes, synthetic_only
        self.by_length = sentences.by_length()
        self._members: dict[int, list[list[int]]] = {}
        self._clusters: dict[int, np.ndarray] = {}

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths that have records, rising."""
        if not self._max_prototypes:
            return list(self.by_length)
        # Only training sentences are cut, so lengths above the longest training sentence have no synthetic
        # records.
        cut = range(min(self.by_length), max(length for length in self.by_length if self.members(length)))
        lengths = sorted({*self.by_length, *cut})
        if self._synthetic_only:
            return [
                length
                for length in lengths
                if self.stored(length) or len(self.members(length)) >= _MIN_MEMBERS
            ]
        return lengths

    def members(self, length: int) -> list[list[int]]:
        """Return the sequences that the synthetic records of a length average, or [] without prototypes."""
        if not self._max_prototypes:
            return []
        if length not in self._members:
            sentences = self._sentences_of(length)
            members = [sentences[row] for row in self._training_rows(length)]
            missing = _ENOUGH_MEMBERS - len(members)
            self._members[length] = members + (self._sentences.cut_to(length, missing) if missing > 0 else [])
        return self._members[length]

    def clusters(self, length: int) -> np.ndarray:
        """Return the cluster of each member of a length, int64 [members]."""
        if length not in self._clusters:
            members = self.members(length)
            inputs = self._first_inputs.of(members).flatten(1).numpy()
            self._clusters[length] = clusters(inputs, self._max_prototypes, merge_small=self._synthetic_only)
        return self._clusters[length]

    def stored(self, length: int) -> int:
        """Return the number of records of sentences of this length."""
        return len(self.by_length.get(length, []))

    def records(self, length: int) -> int:
        """Return the number of records of this length, including synthetic records."""
        return self.stored(length) + len(self._synthetic(length))

    def _synthetic(self, length: int) -> list[tuple[RecordKind, np.ndarray]]:
        """Return the kind of each synthetic record and the indices of its members.

        A single cluster equals the mean of all members, so it is no record of its own.
        """
        assigned = self.clusters(length)
        if self._synthetic_only and len(assigned) < _MIN_MEMBERS:
            return []
        found = [np.flatnonzero(assigned == cluster) for cluster in np.unique(assigned)]
        prototypes = [(RecordKind.PROTOTYPE, indices) for indices in found] if len(found) > 1 else []
        means = [(RecordKind.MEAN, np.arange(len(assigned)))] if len(assigned) else []
        return means + prototypes

    def is_written(self, folder: Path, length: int) -> bool:
        """Return whether the segment of this length is complete on disk."""
        path, records = segment_path(folder, length), self.records(length)
        return is_finished(path, length, records, self.layout, self._seal)

    def write(
        self, folder: Path, rank: np.ndarray, progress: Callable[[int, int], None]
    ) -> AttentionMapStore:
        """Write the segments that are not complete yet, and return the store.

        rank: the order of the heads in the records, int [layers, heads]. progress: called after each record
        with the records done and in total.
        """
        total, done = sum(map(self.records, self.lengths)), 0
        for length in self.lengths:
            path, records = segment_path(folder, length), self.records(length)
            # A stopped build has written the segment, and the disk may have damaged it since.
            if self.is_written(folder, length) and self._is_sound(path, length):
                done += records
                continue
            with SegmentWriter(path, length, records, self.layout, self._seal) as writer:
                for maps, ids, kind in self._contents(length, head_order(rank)):
                    writer.append(maps, ids, kind)
                    done += 1
                    progress(done, total)
        return AttentionMapStore(folder, self.lengths, self.layout, self._seal)

    def _is_sound(self, path: Path, length: int) -> bool:
        segment = Segment(path, length, self.layout, self._seal)
        return bool(segment.are_sound(np.arange(len(segment))).all())

    def write_synthetic(self, recorded: AttentionMapStore, folder: Path) -> AttentionMapStore:
        """Write segments with the synthetic records of `recorded` alone, and return their store.

        recorded: the store that `write` returned. A length without synthetic records gets no segment.
        """
        lengths = [length for length in self.lengths if self._synthetic(length)]
        for length in lengths:
            segment, synthetic = recorded.segments[length], self._synthetic(length)
            path = segment_path(folder, length)
            with SegmentWriter(path, length, len(synthetic), self.layout, self._seal) as writer:
                for record, (kind, _) in enumerate(synthetic, self.stored(length)):
                    maps = [
                        segment.layer_maps(record, layer, heads)
                        for layer, heads in enumerate(self.layout.stored_heads)
                    ]
                    writer.append(maps, [], kind)
        return AttentionMapStore(folder, lengths, self.layout, self._seal)

    def _contents(
        self, length: int, order: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[torch.Tensor], list[int], RecordKind]]:
        """Yield maps, token ids and kind of each record of a length, in the order of the segment."""
        members, clusters, means = self.members(length), self.clusters(length), MeanMaps()
        # The first members are the training sentences, which come first in the segment. Other members were
        # cut from longer sentences.
        whole = min(len(members), len(self._training_rows(length)))
        for index, (ids, maps) in enumerate(self._maps(self._sentences_of(length), order)):
            yield [layer.to(self.layout.dtype) for layer in maps], ids, RecordKind.STORED
            if index < whole:
                means.add(int(clusters[index]), maps)
        for cluster, (_, maps) in zip(clusters[whole:], self._maps(members[whole:], order), strict=True):
            means.add(int(cluster), maps)
        for kind, indices in self._synthetic(length):
            maps = means.of(np.unique(clusters[indices]).tolist())
            # A synthetic record belongs to no token sequence.
            yield [layer.to(self.layout.dtype) for layer in maps], [], kind

    def _sentences_of(self, length: int) -> list[list[int]]:
        return [self._sentences.sequences[index] for index in self.by_length.get(length, [])]

    def _training_rows(self, length: int) -> list[int]:
        return self._sentences.rows(self.by_length.get(length, []), held_out=False)

    def _maps(
        self, sequences: Sequence[list[int]], order: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Yield the token ids and, for each layer, the float32 maps [stored heads, L, L] of each sequence."""
        for indices in token_passes([len(sequence) for sequence in sequences]):
            layers: list[torch.Tensor] = []

            def keep(layer: int, _: object, maps: torch.Tensor, layers: list[torch.Tensor] = layers) -> None:
                stored = list(order[layer][: self.layout.stored_heads[layer]])
                layers.append(maps[:, stored].float().cpu())

            traced_forward(self._model, pack([sequences[index] for index in indices]), keep)
            require_finite(layers, len(sequences[0]))
            for row, index in enumerate(indices):
                yield sequences[index], [maps[row] for maps in layers]

    def features(self, projector: FeatureProjector) -> dict[int, np.ndarray]:
        """Return, for each length, the features [records, dimensions] of its sentences in record order."""
        return {
            length: self._features(projector, self._sentences.chosen(indices))
            for length, indices in self.by_length.items()
        }

    def prototype_index(self, projector: FeatureProjector) -> PrototypeIndex:
        """Return the index of the database's synthetic records, with the means of their members' features."""
        features, lengths, records, kinds = [np.empty((0, projector.dimensions), np.float32)], [], [], []
        for length in self.lengths:
            synthetic = self._synthetic(length)
            if not synthetic:
                continue
            of_members = self._features(projector, self.members(length))
            first = 0 if self._synthetic_only else self.stored(length)
            for number, (kind, indices) in enumerate(synthetic):
                features.append(of_members[indices].mean(axis=0, keepdims=True))
                lengths.append(length)
                records.append(first + number)
                kinds.append(int(kind))
        numbers = (np.array(values, dtype=np.int64) for values in (lengths, records, kinds))
        return PrototypeIndex(np.concatenate(features), *numbers)

    def _features(self, projector: FeatureProjector, sequences: list[list[int]]) -> np.ndarray:
        parts = (
            projector(self._first_inputs.of(sequences[at : at + _SEQUENCES_PER_PASS])).numpy()
            for at in range(0, len(sequences), _SEQUENCES_PER_PASS)
        )
        return np.concatenate(list(parts))
