"""The segments of a database while it is built: every sentence's maps, and prototypes of each length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from attncache_core.attention_maps.mask import head_order
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.prototypes import MeanMaps, PrototypeIndex, clusters
from attncache_core.attention_maps.seal import Seal
from attncache_core.attention_maps.segment_writer import SegmentWriter
from attncache_core.attention_maps.sentences import Sentences, first_inputs, require_finite
from attncache_core.attention_maps.store import (
    AttentionMapStore,
    MapForm,
    RecordKind,
    RecordLayout,
    is_finished,
    segment_path,
)
from attncache_core.attention_maps.substitution import token_passes, traced_forward
from attncache_core.models import PackedModel
from attncache_core.tokens import pack

# Where a length has fewer sentences than this, longer ones are cut to it to make up its prototypes.
_ENOUGH_MEMBERS = 128
_SEQUENCES_PER_PASS = 256


def smallest_form(model: PackedModel) -> MapForm:
    """What a record must hold of a model's maps: a causal one's upper triangles are zeros."""
    causal = all(layer.pattern.is_causal for layer in model.layers)
    return MapForm.PACKED if causal else MapForm.SQUARE


class Recording:
    """What is recorded: of each length the training sentences, those held out, and prototypes, in this order.

    Prototypes are means of training sentences only, so that those held out can measure them. Lengths without
    a sentence, up to the longest, have a prototype of longer sentences that were cut.
    """

    def __init__(
        self,
        model: PackedModel,
        sentences: Sentences,
        layout: RecordLayout,
        prototypes: int,
        seal: Seal,
    ) -> None:
        """prototypes: at most so many of each length."""
        self._model, self._sentences, self.layout, self._seal = model, sentences, layout, seal
        self._most_prototypes = prototypes
        self.by_length = sentences.by_length()
        self._members: dict[int, list[list[int]]] = {}
        self._clusters: dict[int, np.ndarray] = {}

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths that have records, rising."""
        if not self._most_prototypes:
            return list(self.by_length)
        # Only sentences to train on are cut, so beyond the longest of them there is nothing to make up.
        cut = range(min(self.by_length), max(length for length in self.by_length if self.members(length)))
        return sorted({*self.by_length, *cut})

    def members(self, length: int) -> list[list[int]]:
        """The sequences that prototypes of `length` are means of; none if there are to be no prototypes."""
        if not self._most_prototypes:
            return []
        if length not in self._members:
            sentences = self._sentences_of(length)
            own = [sentences[row] for row in self._training_rows(length)]
            missing = _ENOUGH_MEMBERS - len(own)
            self._members[length] = own + (self._sentences.cut_to(length, missing) if missing > 0 else [])
        return self._members[length]

    def clusters(self, length: int) -> np.ndarray:
        """The prototype that each member belongs to, int64 [members]."""
        if length not in self._clusters:
            members = self.members(length)
            inputs = first_inputs(self._model, members).flatten(1).numpy() if members else np.empty((0, 1))
            self._clusters[length] = clusters(inputs, self._most_prototypes)
        return self._clusters[length]

    def stored(self, length: int) -> int:
        """Records of sentences of this length."""
        return len(self.by_length.get(length, []))

    def records(self, length: int) -> int:
        """Records of this length, synthetic ones included."""
        return self.stored(length) + len(self._synthetic(length))

    def _synthetic(self, length: int) -> list[tuple[RecordKind, np.ndarray]]:
        """Kind of each synthetic record, and which of the members (places) it is the mean of.

        One cluster is the same as all members, and no record of its own.
        """
        assigned = self.clusters(length)
        found = [np.flatnonzero(assigned == cluster) for cluster in np.unique(assigned)]
        prototypes = [(RecordKind.PROTOTYPE, places) for places in found] if len(found) > 1 else []
        means = [(RecordKind.MEAN, np.arange(len(assigned)))] if len(assigned) else []
        return means + prototypes

    def is_written(self, folder: Path, length: int) -> bool:
        """Whether this length's segment is whole on disk."""
        path, records = segment_path(folder, length), self.records(length)
        return is_finished(path, length, records, self.layout, self._seal)

    def write(
        self, folder: Path, rank: np.ndarray, progress: Callable[[int, int], None]
    ) -> AttentionMapStore:
        """Write the segments that are not there yet, heads by `rank` [layers, heads]."""
        total, done = sum(map(self.records, self.lengths)), 0
        for length in self.lengths:
            if self.is_written(folder, length):
                done += self.records(length)
                continue
            path, records = segment_path(folder, length), self.records(length)
            with SegmentWriter(path, length, records, self.layout, self._seal) as writer:
                for maps, ids, kind in self._contents(length, head_order(rank)):
                    writer.append(maps, ids, kind)
                    done += 1
                    progress(done, total)
        return AttentionMapStore(folder, self.lengths, self.layout, self._seal)

    def _contents(
        self, length: int, order: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[torch.Tensor], list[int], RecordKind]]:
        """Maps, token ids and kind of each record of a length, in the order of the segment."""
        members, clusters, means = self.members(length), self.clusters(length), MeanMaps()
        # The first members are the first sentences, those to train on; the others were cut.
        own = min(len(members), len(self._training_rows(length)))
        for place, (ids, maps) in enumerate(self._maps(self._sentences_of(length), order)):
            yield [layer.to(self.layout.dtype) for layer in maps], ids, RecordKind.STORED
            if place < own:
                means.add(int(clusters[place]), maps)
        for cluster, (_, maps) in zip(clusters[own:], self._maps(members[own:], order), strict=True):
            means.add(int(cluster), maps)
        for kind, places in self._synthetic(length):
            maps = means.of(np.unique(clusters[places]).tolist())
            # No sequence of tokens is its own.
            yield [layer.to(self.layout.dtype) for layer in maps], [], kind

    def _sentences_of(self, length: int) -> list[list[int]]:
        return [self._sentences.sequences[index] for index in self.by_length.get(length, [])]

    def _training_rows(self, length: int) -> list[int]:
        return self._sentences.rows(self.by_length.get(length, []), held_out=False)

    def _maps(
        self, sequences: Sequence[list[int]], order: Sequence[Sequence[int]]
    ) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Token ids and, for each layer, float32 maps [stored heads, L, L] of sequences of one length."""
        for places in token_passes([len(sequence) for sequence in sequences]):
            layers: list[torch.Tensor] = []

            def keep(layer: int, _: object, maps: torch.Tensor, layers: list[torch.Tensor] = layers) -> None:
                stored = list(order[layer][: self.layout.stored_heads[layer]])
                layers.append(maps[:, stored].float().cpu())

            traced_forward(self._model, pack([sequences[place] for place in places]), keep)
            require_finite(layers, len(sequences[0]))
            for row, place in enumerate(places):
                yield sequences[place], [maps[row] for maps in layers]

    def features(self, projector: FeatureProjector) -> dict[int, np.ndarray]:
        """Length -> the features [records, dimensions] of its sentences, in the order of their records."""
        return {
            length: self._features(projector, [self._sentences.sequences[index] for index in indices])
            for length, indices in self.by_length.items()
        }

    def prototype_index(self, projector: FeatureProjector) -> PrototypeIndex:
        """Where the prototypes lie: at the mean of their members' features."""
        features, lengths, records, kinds = [np.empty((0, projector.dimensions), np.float32)], [], [], []
        for length in self.lengths:
            synthetic = self._synthetic(length)
            if not synthetic:
                continue
            of_members = self._features(projector, self.members(length))
            for number, (kind, places) in enumerate(synthetic):
                features.append(of_members[places].mean(axis=0, keepdims=True))
                lengths.append(length)
                records.append(self.stored(length) + number)
                kinds.append(int(kind))
        numbers = (np.array(values, dtype=np.int64) for values in (lengths, records, kinds))
        return PrototypeIndex(np.concatenate(features), *numbers)

    def _features(self, projector: FeatureProjector, sequences: list[list[int]]) -> np.ndarray:
        parts = (
            projector(first_inputs(self._model, sequences[at : at + _SEQUENCES_PER_PASS])).numpy()
            for at in range(0, len(sequences), _SEQUENCES_PER_PASS)
        )
        return np.concatenate(list(parts))
