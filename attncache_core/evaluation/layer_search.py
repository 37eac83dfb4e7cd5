"""The search before one layer, as AttnCache-f has it: a projector and an index of the layer's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import faiss
import numpy as np
import torch

from attncache_core.attention_maps.index import nearest_in
from attncache_core.attention_maps.projector import DIMENSIONS, FeatureProjector
from attncache_core.attention_maps.store import AttentionMapStore
from attncache_core.attention_maps.training import PairGroup, map_distances, train_projector
from attncache_core.tokens import TokenBatch

# Pairs to train on: of long sequences fewer, so that comparing their maps takes less than a second a length.
_MOST_TRAINING_RECORDS = 256
_MOST_COMPARISONS = 2e8


class Nearest(NamedTuple):
    """What was found for the sequences of a batch, in packed order."""

    records: np.ndarray  # int64 [sequences], -1 where there is none of the length
    similarities: np.ndarray  # float32 [sequences], nan where there is none


def nothing_found(sequences: int) -> Nearest:
    """For sequences that there is nothing to search for."""
    return Nearest(np.full(sequences, -1), np.full(sequences, np.nan, dtype=np.float32))


class LayerSearch:
    """One layer's projector, and an exact index for each length."""

    def __init__(self, projector: FeatureProjector) -> None:
        self.projector = projector
        self._indexes: dict[int, faiss.IndexFlatL2] = {}

    @torch.inference_mode()
    def add(self, inputs: torch.Tensor) -> None:
        """The records of a length, by the layer's input [records, L, hidden] of their sequences."""
        index = faiss.IndexFlatL2(DIMENSIONS)
        index.add(self.projector(inputs).numpy())
        self._indexes[inputs.shape[1]] = index

    def nearest(self, batch: TokenBatch, hidden: torch.Tensor) -> Nearest:
        """For each sequence its nearest record, from the layer's input [tokens, hidden].

        Its similarity is 1 - the distance of the features, at most 1.
        """
        found = nothing_found(len(batch.lengths))
        groups = [group for group in batch.groups() if group.length in self._indexes]
        if not groups:
            return found
        for group, features in zip(groups, self.projector.project(hidden, groups), strict=True):
            records, distances = nearest_in(self._indexes[group.length], features)
            found.records[group.sequences] = records
            found.similarities[group.sequences] = 1 - distances
        return found


def train_layer_search(
    store: AttentionMapStore, layer: int, inputs: Mapping[int, torch.Tensor], *, steps: int, seed: int
) -> LayerSearch:
    """A projector trained on the distances of one layer's stored maps, and the features of all records.

    inputs: for each length what the layer reads of the first records' sequences, [records, L, hidden].
    Eq. 1 to 3 of AttnCache, with n the heads of this layer alone and no length term: pairs are of one
    length. Raises ValueError if no two records are.
    """
    torch.manual_seed(seed)  # the projector's first weights
    hidden_size = next(iter(inputs.values())).shape[2]
    projector = FeatureProjector(hidden_size, max(inputs))
    train_projector(_pair_groups(store, layer, inputs, seed), projector, steps=steps, seed=seed)
    search = LayerSearch(_packed(projector))
    for of_length in inputs.values():
        search.add(of_length)
    return search


def _packed(projector: FeatureProjector) -> FeatureProjector:
    """As it is once it was written and read: packed for the processor, as AttnCache's own is."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "projector.safetensors"
        path.write_bytes(projector.to_bytes())
        return FeatureProjector.load(path)


def _pair_groups(
    store: AttentionMapStore, layer: int, inputs: Mapping[int, torch.Tensor], seed: int
) -> list[PairGroup]:
    """For each length inputs and map distances of records chosen at random."""
    random = np.random.default_rng(seed)
    heads = store.layout.stored_heads[layer]
    groups = []
    for length, of_length in inputs.items():
        most = min(_MOST_TRAINING_RECORDS, math.isqrt(int(_MOST_COMPARISONS / (heads * length**2))))
        rows = torch.from_numpy(random.permutation(len(of_length))[:most])
        maps = store.segments[length].gather_layer_maps(rows, layer, heads)
        groups.append(PairGroup(of_length[rows].float(), map_distances(maps, maps)))
    return groups
