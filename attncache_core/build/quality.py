"""Compare the records that the projector chooses with other choices, by the true distance of the maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attncache_core.build.first_inputs import FirstInputs
from attncache_core.build.sentences import Sentences
from attncache_core.build.training import ALPHA, map_distances
from attncache_core.calibration.probes import Probes
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.store import AttentionMapStore

# Maximum number of held-out sentences to compare with every record.
_MAX_PROBES = 300
# Values of the records' maps in memory at once: 100 MB.
_VALUES_AT_ONCE = 25_000_000
# The hit rate in the papers. The choices are also compared on this share of the probes, the most similar
# ones.
_NEAR_SHARE = 0.3


def masked_maps(
    store: AttentionMapStore, mask: ReuseMask, length: int, records: Sequence[int]
) -> torch.Tensor:
    """Return the maps of the mask's heads for records of one length, float32 [n, heads, L, L]."""
    chosen = torch.tensor(records)
    return torch.cat(
        [
            store.segments[length].gather_layer_maps(chosen, layer, reused).float()
            for layer, reused in enumerate(mask.reused)
            if reused
        ],
        dim=1,
    )


def _record_distances(
    store: AttentionMapStore, mask: ReuseMask, length: int, own: Sequence[int], others: Sequence[int]
) -> torch.Tensor:
    """Return the map distances of records to other records of their length, [own, others].

    The maps of the others are read in parts to limit memory.
    """
    maps = masked_maps(store, mask, length, own)
    step = max(1, _VALUES_AT_ONCE // (mask.total * length**2))
    parts = (others[at : at + step] for at in range(0, len(others), step))
    return torch.cat([map_distances(maps, masked_maps(store, mask, length, part)) for part in parts], dim=1)


def donor_distances(
    first_inputs: FirstInputs,
    sentences: Sentences,
    store: AttentionMapStore,
    probes: Probes,
    mask: ReuseMask,
) -> dict[str, float]:
    """Return mean true map distances (Eq. 2 without α, heads of `mask`) from held-out probes to records.

    chosen: the record that the projector chose. best: the record with the least distance. nearest_by_input:
    the record with the nearest first-layer input. random: a random record (the mean over all). predicted: the
    distance that the projector predicted. Names with the suffix `_near` are means over the 30 % of the probes
    with the greatest similarity. Empty if no probe has a stored record.
    """
    served = np.flatnonzero(probes.records[RecordKind.STORED] >= 0)
    served = served[:: -(-len(served) // _MAX_PROBES)] if len(served) else served
    by_length, rows = sentences.by_length(), []
    for length in np.unique(probes.lengths[served]).tolist():
        members = by_length[length]
        recorded = sentences.rows(members, held_out=False)
        row_of = {tuple(sentences.sequences[index]): row for row, index in enumerate(members)}
        indices = served[probes.lengths[served] == length]
        own = [row_of[tuple(probes.sequences[index])] for index in indices]
        true = _record_distances(store, mask, length, own, recorded)
        inputs = first_inputs.of(sentences.chosen(members)).flatten(1)
        by_input = torch.cdist(inputs[own], inputs[recorded]).argmin(dim=1)
        for row, index in enumerate(indices):
            chosen = recorded.index(int(probes.records[RecordKind.STORED][index]))
            predicted = (1.0 - probes.similarities[RecordKind.STORED][index]) / ALPHA
            rows.append(
                [true[row, chosen], true[row].min(), true[row, by_input[row]], true[row].mean(), predicted]
            )
    if not rows:
        return {}
    names = ("chosen", "best", "nearest_by_input", "random", "predicted")
    table = np.array(rows, dtype=np.float64)
    near = table[np.argsort(table[:, -1], kind="stable")[: max(1, round(_NEAR_SHARE * len(table)))]]
    return {
        **dict(zip(names, table.mean(axis=0).tolist(), strict=True)),
        **dict(zip((f"{name}_near" for name in names), near.mean(axis=0).tolist(), strict=True)),
    }
