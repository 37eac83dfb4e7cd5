"""How good the records are that the projector chooses: their true map distance, beside other choices'."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attncache_core.attention_maps.mask import ReuseMask
from attncache_core.attention_maps.probes import Probes
from attncache_core.attention_maps.sentences import Sentences
from attncache_core.attention_maps.store import AttentionMapStore, RecordKind
from attncache_core.attention_maps.training import ALPHA, map_distances
from attncache_core.models import PackedModel

# Held-out sentences whose true distance to every record is taken.
_MOST_PROBES = 300
# Numbers of records' maps in memory at once for it: 100 MB.
_NUMBERS_AT_ONCE = 25_000_000
# The papers' hit rate: choices are compared on this share of the probes too, those most surely served.
_NEAR_SHARE = 0.3


def masked_maps(
    store: AttentionMapStore, mask: ReuseMask, length: int, records: Sequence[int]
) -> torch.Tensor:
    """The maps of a mask's heads of some records of one length, float32 [n, heads, L, L]."""
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
    """Map distance of records to others of their length, [own, others], a part of the others at a time."""
    maps = masked_maps(store, mask, length, own)
    step = max(1, _NUMBERS_AT_ONCE // (mask.total * length**2))
    parts = (others[at : at + step] for at in range(0, len(others), step))
    return torch.cat([map_distances(maps, masked_maps(store, mask, length, part)) for part in parts], dim=1)


def donor_distances(
    model: PackedModel, sentences: Sentences, store: AttentionMapStore, probes: Probes, mask: ReuseMask
) -> dict[str, float]:
    """Mean true map distance (Eq. 2 without α, heads of `mask`) of stored records to held-out probes.

    Of the record the projector chose, the best record in the database, the one nearest by input embedding,
    and a random one; beside them the distance that the projector predicted. Names that end in `_near` speak
    of the 30 % of probes with the greatest similarity.
    """
    served = np.flatnonzero(probes.records[RecordKind.STORED] >= 0)
    served = served[:: -(-len(served) // _MOST_PROBES)] if len(served) else served
    by_length, rows = sentences.by_length(), []
    for length in np.unique(probes.lengths[served]).tolist():
        members = by_length[length]
        recorded = sentences.rows(members, held_out=False)
        row_of = {tuple(sentences.sequences[index]): row for row, index in enumerate(members)}
        places = served[probes.lengths[served] == length]
        own = [row_of[tuple(probes.sequences[place])] for place in places]
        true = _record_distances(store, mask, length, own, recorded)
        inputs = sentences.inputs(model, members).flatten(1)
        by_input = torch.cdist(inputs[own], inputs[recorded]).argmin(dim=1)
        for row, place in enumerate(places):
            chosen = recorded.index(int(probes.records[RecordKind.STORED][place]))
            predicted = (1.0 - probes.similarities[RecordKind.STORED][place]) / ALPHA
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
