"""Compare the records that the projector chooses with other choices, by the true distance of the maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch

from attncache_core.build.sentences import FirstInputs, Sentences
from attncache_core.build.training import ALPHA, map_distances, masked_maps
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.storage.store import AttentionMapStore

# Maximum number of held-out sentences to compare with every record.
_MAX_PROBES = 300
# Values of the records' maps in memory at once: 100 MB.
_VALUES_AT_ONCE = 25_000_000
# The hit rate in the papers. The choices are also compared on this share of the probes, the most similar
# ones.
_NEAR_SHARE = 0.3


def _record_distances(
    store: AttentionMapStore, mask: ReuseMask, length: int, reusing: Sequence[int], others: Sequence[int]
) -> torch.Tensor:
    """Return the map distances of records to other records of their length, [reusing, others].

    The maps of the others are read in parts to limit memory.
    """
    maps = masked_maps(store, mask, length, reusing)
    step = max(1, _VALUES_AT_ONCE // (mask.total * length**2))
    parts = (others[at : at + step] for at in range(0, len(others), step))
    return torch.cat([map_distances(maps, masked_maps(store, mask, length, part)) for part in parts], dim=1)


def _probes(sentences: Sentences) -> dict[int, list[int]]:
    """Return, for each length with training sentences, the rows of the held-out sentences to compare."""
    probes = [
        (length, row)
        for length, members in sentences.by_length().items()
        if sentences.rows(members, held_out=False)
        for row in sentences.rows(members, held_out=True)
    ]
    chosen = probes[:: -(-len(probes) // _MAX_PROBES)] if probes else []
    return {length: [row for _, row in pairs] for length, pairs in groupby(chosen, key=itemgetter(0))}


@torch.inference_mode()
def donor_distances(
    first_inputs: FirstInputs,
    sentences: Sentences,
    store: AttentionMapStore,
    projectors: Mapping[str, FeatureProjector],
    mask: ReuseMask,
) -> dict[str, float]:
    """Return mean true map distances (Eq. 2 without α, heads of `mask`) from held-out sentences to records.

    The records are those of the training sentences, whether the policy searches them or not. projectors: by
    the name of the distance to the record that each projector chooses; the first one also predicts. best: the
    record with the least distance. nearest_by_input: the record with the nearest first-layer input. random: a
    random record (the mean over all). predicted: the distance that the first projector predicts. Names with
    the suffix `_near` are means over the 30 % of the sentences with the least predicted distance. Empty if no
    held-out sentence has a training sentence of its length.
    """
    by_length, parts = sentences.by_length(), []
    for length, probes in _probes(sentences).items():
        members = by_length[length]
        recorded = sentences.rows(members, held_out=False)
        true = _record_distances(store, mask, length, probes, recorded)
        inputs = first_inputs.of(sentences.chosen(members))
        features = [projector(inputs) for projector in projectors.values()]
        nearest = [
            torch.cdist(vectors[probes], vectors[recorded]).min(dim=1)
            for vectors in (*features, inputs.flatten(1))
        ]
        *chosen, by_input = (true.gather(1, found.indices[:, None])[:, 0] for found in nearest)
        predicted = nearest[0].values / ALPHA
        parts.append(torch.stack([*chosen, true.amin(dim=1), by_input, true.mean(dim=1), predicted], dim=1))
    if not parts:
        return {}
    names = (*projectors, "best", "nearest_by_input", "random", "predicted")
    table = torch.cat(parts).double().numpy()
    near = table[np.argsort(table[:, -1], kind="stable")[: max(1, round(_NEAR_SHARE * len(table)))]]
    return {
        **dict(zip(names, table.mean(axis=0).tolist(), strict=True)),
        **dict(zip((f"{name}_near" for name in names), near.mean(axis=0).tolist(), strict=True)),
    }
