"""Search records before one layer, as in AttnCache-f: each layer has its own projector and index."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import faiss
import numpy as np
import torch

from attncache_core.build.training import PairGroup, map_distances, train_projector
from attncache_core.reuse.maps.index import nearest_in
from attncache_core.reuse.maps.projector import DIMENSIONS, FeatureProjector
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.text.token_batch import TokenBatch

# Bounds on the training pairs. Long sequences have fewer pairs, so that comparing their maps takes less than
# a second per length.
_MAX_TRAINING_RECORDS = 256
_MAX_COMPARISONS = 2e8


class Nearest(NamedTuple):
    """The nearest records of the sequences of a batch, in packed order."""

    records: np.ndarray  # int64 [sequences], -1 if there are no records of the length
    similarities: np.ndarray  # float32 [sequences], nan if there are no records of the length


def nothing_found(sequences: int) -> Nearest:
    """Return the result for sequences of lengths without records."""
    return Nearest(np.full(sequences, -1), np.full(sequences, np.nan, dtype=np.float32))


class LayerSearch:
    """The projector of one layer, and an exact index of the features of records for each length."""

    def __init__(self, projector: FeatureProjector) -> None:
        self.projector = projector
        self._indexes: dict[int, faiss.IndexFlatL2] = {}

    @torch.inference_mode()
    def add(self, inputs: torch.Tensor) -> None:
        """Add the records of a length. inputs: the layer's input of their sequences, [records, L, hidden]."""
        index = faiss.IndexFlatL2(DIMENSIONS)
        index.add(self.projector(inputs).numpy())
        self._indexes[inputs.shape[1]] = index

    def nearest(self, batch: TokenBatch, hidden: torch.Tensor) -> Nearest:
        """Return the nearest record of each sequence. hidden: the layer's input, [tokens, hidden].

        A similarity is 1 - L2 distance of the features, at most 1.
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
    store: AttentionMapStore, layer: int, inputs: Mapping[int, torch.Tensor], *, steps: int
) -> LayerSearch:
    """Train a projector on the map distances of one layer, and index the features of all records.

    inputs: length -> the layer's input for the sequences of the first records, [records, L, hidden]. Uses
    Eq. 1 to 3 of AttnCache with n the number of heads of this layer, and without the length term, because
    all pairs have one length. Raises ValueError if no two records have the same length.
    """
    torch.manual_seed(0)  # for the initial weights of the projector
    hidden_size = next(iter(inputs.values())).shape[2]
    projector = FeatureProjector(hidden_size, max(inputs))
    train_projector(_pair_groups(store, layer, inputs), projector, steps=steps)
    search = LayerSearch(_packed(projector))
    for of_length in inputs.values():
        search.add(of_length)
    return search


def _packed(projector: FeatureProjector) -> FeatureProjector:
    """Return the projector after a round trip through a file, which packs its weights for the processor.

    AttnCache's own projector is loaded from a file too.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "projector.safetensors"
        path.write_bytes(projector.to_bytes())
        return FeatureProjector.load(path)


def _pair_groups(store: AttentionMapStore, layer: int, inputs: Mapping[int, torch.Tensor]) -> list[PairGroup]:
    """Return the layer inputs and the map distances of randomly chosen records of each length."""
    random = np.random.default_rng(0)
    heads = store.layout.stored_heads[layer]
    groups = []
    for length, of_length in inputs.items():
        maximum = min(_MAX_TRAINING_RECORDS, math.isqrt(int(_MAX_COMPARISONS / (heads * length**2))))
        rows = torch.from_numpy(random.permutation(len(of_length))[:maximum])
        maps = store.segments[length].gather_layer_maps(rows, layer, heads)
        groups.append(PairGroup(of_length[rows].float(), map_distances(maps, maps)))
    return groups
