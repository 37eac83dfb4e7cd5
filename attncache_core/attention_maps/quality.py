"""Mask and θ for a quality budget, measured on held-out sentences against the records of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attncache_core.attention_maps.calibration import (
    BatchMaps,
    ChosenPolicy,
    choose_policy,
    probed,
    substituted_outputs,
    token_passes,
)
from attncache_core.attention_maps.index import FeatureIndex
from attncache_core.attention_maps.mask import ReuseMask
from attncache_core.attention_maps.search import MOST_SIMILAR_OTHER
from attncache_core.attention_maps.sentences import Sentences
from attncache_core.attention_maps.store import AttentionMapStore
from attncache_core.attention_maps.training import ALPHA, map_distances
from attncache_core.models import PackedModel
from attncache_core.outputs import cosines
from attncache_core.tokens import TokenBatch, pack

# Fewer held-out sentences than this say nothing about a mean of cosines.
FEWEST_PROBES = 20
# Held-out sentences whose true distance to every record is taken, for the report on the projector.
_MOST_DISTANCE_PROBES = 300
# Numbers of records' maps in memory at once for it: 100 MB.
_NUMBERS_AT_ONCE = 25_000_000


@dataclass(frozen=True)
class Probes:
    """Held-out sentences that have a record of their length, each with its nearest one."""

    indices: list[int]  # of the sentences, lengths rising
    records: np.ndarray  # int64 [probes]: record number within the length's segment
    similarities: np.ndarray  # float64 [probes]
    without_record: int  # held-out sentences of a length that no training sentence has


def find_probes(sentences: Sentences, features: dict[int, np.ndarray]) -> Probes:
    """Search every held-out sentence among the training sentences' features (length -> [records, d])."""
    index, indices, records, similarities = FeatureIndex(), [], [], []
    for length, members in sentences.by_length().items():
        asked, recorded = sentences.rows(members, held_out=True), sentences.rows(members, held_out=False)
        if not asked or not recorded:
            continue
        index.add(length, features[length][recorded])
        found, distances = index.nearest(length, features[length][asked])
        indices += [members[row] for row in asked]
        records += [recorded[place] for place in found]
        similarities += np.minimum(1.0 - distances, MOST_SIMILAR_OTHER).tolist()
    return Probes(
        indices, np.array(records), np.array(similarities), int(sentences.held_out.sum()) - len(indices)
    )


def measure_policy(
    model: PackedModel,
    sentences: Sentences,
    store: AttentionMapStore,
    probes: Probes,
    masks: Sequence[ReuseMask],
    min_cosine: float,
    threshold: float | None = None,
    on_pass: Callable[[int, int], None] = lambda *_: None,
) -> tuple[ReuseMask, dict[str, Any]]:
    """The best of `masks` with its θ inside the budget (see choose_policy), and the report for the manifest.

    With too few probes to measure, the largest mask and θ = 1 (or the given one): recorded sentences only.
    """
    if len(probes.indices) < FEWEST_PROBES:
        mask = max(masks, key=lambda mask: mask.total)
        return mask, {"measured": 0, "threshold": 1.0 if threshold is None else threshold}
    cosine = _cosines_by_mask(model, sentences, store, probes, masks, on_pass)
    # A held-out sentence without a record of its length is a miss at any θ.
    similarities = np.concatenate([probes.similarities, np.full(probes.without_record, -np.inf)])
    padded = {size: np.concatenate([row, np.ones(probes.without_record)]) for size, row in cosine.items()}
    chosen = choose_policy(padded, similarities, min_cosine, threshold)
    mask = next(mask for mask in masks if mask.total == chosen.heads)
    hits = similarities >= chosen.threshold
    return mask, {
        "measured": len(similarities),
        "min_cosine": min_cosine,
        "threshold": chosen.threshold,
        "heads": chosen.heads,
        "hit_rate": chosen.hit_rate,
        "mean_cosine": chosen.mean_cosine if hits.any() else None,
        "cosine_5th_percentile": float(np.percentile(padded[chosen.heads][hits], 5)) if hits.any() else None,
        "candidates": [
            _as_row(choose_policy({size: row}, similarities, min_cosine)) for size, row in padded.items()
        ],
    }


def _as_row(policy: ChosenPolicy) -> dict[str, Any]:
    mean = None if np.isnan(policy.mean_cosine) else policy.mean_cosine
    return {
        "heads": policy.heads,
        "threshold": policy.threshold,
        "hit_rate": policy.hit_rate,
        "mean_cosine": mean,
    }


def _cosines_by_mask(
    model: PackedModel,
    sentences: Sentences,
    store: AttentionMapStore,
    probes: Probes,
    masks: Sequence[ReuseMask],
    on_pass: Callable[[int, int], None],
) -> dict[int, np.ndarray]:
    """Mask size -> cosine of each probe's output, its maps taken from its record, to the full model's."""
    sequences = [sentences.sequences[index] for index in probes.indices]
    result = {mask.total: np.zeros(len(sequences)) for mask in masks}
    passes = list(token_passes([len(sequence) for sequence in sequences]))
    for done, places in enumerate(passes):
        batch = pack([sequences[place] for place in places])
        donors = _stored_maps(store, masks[0].order, batch, probes.records[places])
        measured = probed(model, batch, donors)
        for mask in masks:
            changed = substituted_outputs(model, measured, mask.as_array())
            result[mask.total][places] = cosines(changed, measured.outputs)
        on_pass(done + 1, len(passes))
    return result


def _stored_maps(
    store: AttentionMapStore, order: Sequence[Sequence[int]], batch: TokenBatch, records: np.ndarray
) -> BatchMaps:
    """The records' maps for a packed batch, heads as the checkpoint numbers them, zero if not stored."""
    layers: BatchMaps = []
    for layer, (heads, held) in enumerate(zip(order, store.layout.stored_heads, strict=True)):
        groups = []
        for group in batch.groups():
            maps = torch.zeros(group.count, len(heads), group.length, group.length, dtype=store.layout.dtype)
            chosen = torch.from_numpy(records[group.sequences])
            maps[:, list(heads[:held])] = store.segments[group.length].gather_layer_maps(chosen, layer, held)
            groups.append(maps)
        layers.append(groups)
    return layers


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
    """How good the chosen records are: mean true map distance (Eq. 2 without α, heads of `mask`) on probes.

    Of the record the projector chose, the best record in the database, the one nearest by input embedding,
    and a random one; beside them the distance that the projector predicted.
    """
    if not probes.indices:
        return {}
    step = -(-len(probes.indices) // _MOST_DISTANCE_PROBES)
    asked: dict[int, list[int]] = {}
    for place in range(0, len(probes.indices), step):
        asked.setdefault(len(sentences.sequences[probes.indices[place]]), []).append(place)
    by_length = sentences.by_length()
    rows = []
    for length, places in asked.items():
        members = by_length[length]
        recorded = sentences.rows(members, held_out=False)
        own = [members.index(probes.indices[place]) for place in places]
        true = _record_distances(store, mask, length, own, recorded)
        inputs = sentences.inputs(model, members).flatten(1)
        by_input = torch.cdist(inputs[own], inputs[recorded]).argmin(dim=1)
        for row, place in enumerate(places):
            chosen = recorded.index(int(probes.records[place]))
            predicted = (1.0 - probes.similarities[place]) / ALPHA
            rows.append(
                [true[row, chosen], true[row].min(), true[row, by_input[row]], true[row].mean(), predicted]
            )
    means = np.array(rows, dtype=np.float64).mean(axis=0).tolist()
    return dict(zip(("chosen", "best", "nearest_by_input", "random", "predicted"), means, strict=True))
