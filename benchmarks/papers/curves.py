"""Measure the trade-off between saved time and quality for many masks, thresholds and choices of records.

Nothing is skipped in these measurements: maps are computed and then replaced by the maps of records, and the
outputs are compared with the full model's. Saved times come from the cost model, without the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from attncache_core.build.training import ALPHA, map_distances, masked_maps
from attncache_core.calibration.calibrate import Progress, candidate_masks
from attncache_core.calibration.probes import Measured, Probes, measure, stored_maps
from attncache_core.calibration.substitution import collect_maps, token_passes
from attncache_core.calibration.thresholds import fit_curve
from attncache_core.heads.comparator import OutputComparator
from attncache_core.models import PackedModel
from attncache_core.reuse.maps.policy import KindPolicy
from attncache_core.reuse.mask import ReuseMask, mildest_mask, parse_heads
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.text.token_batch import pack

# Figure 6 of the AttnCache paper goes down to 0.85, but here nearly all texts hit at 0.94.
THRESHOLDS = np.round(np.arange(0.94, 0.9951, 0.0025), 4)
_HIT_SHARES = np.linspace(0.05, 1.0, 20)


@dataclass(frozen=True, slots=True)
class Point:
    """A policy of a family of policies: one mask at one hit rate."""

    family: str
    heads: int  # reused heads of all layers
    hit_rate: float
    saved: float  # saved share of the full model's time
    quality: float  # mean over the hits


@dataclass(frozen=True, slots=True)
class ThresholdPoint:
    """Hit rate and quality of one mask at one θ, with records of sentences only."""

    mask: str
    heads: int  # reused heads of all layers
    threshold: float
    hit_rate: float
    quality: float | None  # mean over the hits; None without hits
    quality_of_all: float  # mean over all texts; a miss counts as 1


@dataclass(frozen=True)
class Curves:
    """All figures to plot."""

    points: list[Point]
    thresholds: list[ThresholdPoint]
    similarities: dict[RecordKind, tuple[np.ndarray, np.ndarray]]  # predicted and true, float [probes] each


def measure_curves(
    model: PackedModel,
    store: AttentionMapStore,
    probes: Probes,
    rank: np.ndarray,
    chosen: ReuseMask,
    comparator: OutputComparator,
    saved_per_hit: Callable[[np.ndarray, int], np.ndarray],
    full_microseconds: float,
    progress: Progress = lambda *_: None,
) -> Curves:
    """Measure all families of policies on the probes.

    model: a model without a mask. rank: order in which heads join a mask, [layers, heads]. chosen: the
    policy's mask. saved_per_hit: see calibration.savings.Savings. full_microseconds: mean time of the full
    model for a probe, in µs. progress: called with the name of a stage, and its finished and total steps.
    """
    mildest = candidate_masks(rank)
    layers = _layer_masks(rank)
    everything = parse_heads("all", rank)
    masks = [*mildest, *layers, everything, chosen]
    measured = measure(model, store, probes, masks, comparator, partial(progress, "measuring masks"))
    compared = mildest_mask(rank, max(1, rank.size * 2 // 3))
    best = _with_best_records(model, store, probes, compared, partial(progress, "comparing maps"))
    by_best = measure(model, store, best, mildest, comparator, partial(progress, "measuring best records"))
    share = partial(_points, probes, lambda lengths, heads: saved_per_hit(lengths, heads) / full_microseconds)
    stored, prototype = RecordKind.STORED, RecordKind.PROTOTYPE
    count = len(mildest)
    points = [
        *_family("mildest heads, better kind", share, mildest, measured[:count], _by_expected_damage, probes),
        *_family("whole layers", share, layers, measured[count:-2], partial(_by_similarity, stored), probes),
        *_family("all heads", share, [everything], measured[-2:-1], partial(_by_similarity, stored), probes),
        *_family(
            "prototypes only", share, mildest, measured[:count], partial(_by_similarity, prototype), probes
        ),
        *_family("best stored record", share, mildest, by_best, partial(_by_similarity, stored), best),
    ]
    thresholds = [
        *_by_threshold("all heads", everything, probes, measured[-2][stored]),
        *_by_threshold("the policy's heads", chosen, probes, measured[-1][stored]),
    ]
    return Curves(points, thresholds, _similarities(model, store, probes, compared))


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in both saved time and quality, by ascending saved time."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.saved, -point.quality)):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    return best[::-1]


def _layer_masks(rank: np.ndarray) -> list[ReuseMask]:
    """Return masks of whole layers, in order of the mean rank of their heads: one layer up to all but one."""
    order = np.argsort(rank.mean(axis=1), kind="stable").tolist()
    return [
        parse_heads("layers:" + ",".join(map(str, order[:count])), rank) for count in range(1, len(order))
    ]


# Orders probes for hits: (probes, measurements of each kind) -> for each probe a score, the highest of which
# hits first, and the kind of record that serves the probe.
_Order = Callable[[Probes, Mapping[RecordKind, Measured]], tuple[np.ndarray, np.ndarray]]


def _by_similarity(
    kind: RecordKind, probes: Probes, _: Mapping[RecordKind, Measured]
) -> tuple[np.ndarray, np.ndarray]:
    return probes.similarities[kind].astype(np.float64), np.full(len(probes.sequences), kind)


def _by_expected_damage(
    probes: Probes, measured: Mapping[RecordKind, Measured]
) -> tuple[np.ndarray, np.ndarray]:
    expected = np.full((len(RecordKind), len(probes.sequences)), np.inf)
    for kind in RecordKind:
        known = np.isfinite(probes.similarities[kind])
        if known.any():
            curve = KindPolicy(
                1.0, *fit_curve(probes.similarities[kind][known], measured[kind].damage[known])
            )
            expected[kind, known] = curve.expected_damage(probes.similarities[kind][known])
    return -expected.min(axis=0), expected.argmin(axis=0)


def _family(
    name: str,
    points: Callable[..., Iterator[Point]],
    masks: Sequence[ReuseMask],
    measured: Sequence[Mapping[RecordKind, Measured]],
    order: _Order,
    probes: Probes,
) -> list[Point]:
    found = []
    for mask, of_mask in zip(masks, measured, strict=True):
        scores, kinds = order(probes, of_mask)
        quality = np.array([of_mask[kind].fidelity for kind in RecordKind])[kinds, np.arange(len(kinds))]
        found += list(points(name, mask.total, scores, quality))
    return found


def _points(
    probes: Probes,
    saved_per_hit: Callable[[np.ndarray, int], np.ndarray],
    family: str,
    heads: int,
    scores: np.ndarray,
    quality: np.ndarray,
) -> Iterator[Point]:
    ranked = np.argsort(-scores, kind="stable")
    ranked = ranked[np.isfinite(scores[ranked])]
    saved = saved_per_hit(probes.lengths, heads) / len(scores)
    for share in _HIT_SHARES:
        hits = ranked[: round(share * len(scores))]
        if len(hits):
            yield Point(
                family, heads, len(hits) / len(scores), float(saved[hits].sum()), float(quality[hits].mean())
            )


def _by_threshold(name: str, mask: ReuseMask, probes: Probes, measured: Measured) -> Iterator[ThresholdPoint]:
    for threshold in THRESHOLDS.tolist():
        hits = probes.similarities[RecordKind.STORED] >= threshold
        yield ThresholdPoint(
            name,
            mask.total,
            threshold,
            float(hits.mean()),
            float(measured.fidelity[hits].mean()) if hits.any() else None,
            float(np.where(hits, measured.fidelity, 1.0).mean()),
        )


def _with_best_records(
    model: PackedModel,
    store: AttentionMapStore,
    probes: Probes,
    mask: ReuseMask,
    on_length: Callable[[int, int], None],
) -> Probes:
    """Return the probes with other records of sentences: those with the least map distance.

    The map distance is computed from the maps of the heads of `mask`, not predicted.
    """
    records = probes.records[RecordKind.STORED].copy()
    similarities = probes.similarities[RecordKind.STORED].copy()
    lengths = np.unique(probes.lengths[records >= 0]).tolist()
    for done, length in enumerate(lengths, 1):
        segment = store.segments[length]
        stored = np.flatnonzero(segment.kinds == RecordKind.STORED)
        of_length = np.flatnonzero((probes.lengths == length) & (records >= 0))
        maps = _own_maps(model, [probes.sequences[index] for index in of_length], mask)
        parts = np.array_split(stored, max(1, len(stored) * mask.total * length**2 // 25_000_000))
        distances = torch.cat(
            [map_distances(maps, masked_maps(store, mask, length, part.tolist())) for part in parts], dim=1
        )
        records[of_length] = stored[distances.argmin(dim=1).numpy()]
        similarities[of_length] = 1 - ALPHA * distances.min(dim=1).values.numpy()
        on_length(done, len(lengths))
    return replace(
        probes,
        records={**probes.records, RecordKind.STORED: records},
        similarities={**probes.similarities, RecordKind.STORED: similarities},
    )


def _own_maps(model: PackedModel, sequences: Sequence[Sequence[int]], mask: ReuseMask) -> torch.Tensor:
    """Return the maps of a mask's heads for n sequences of one length, float32 [n, heads, L, L]."""
    layers = collect_maps(model, pack(sequences))
    return torch.cat(
        [
            groups[0][:, list(order[:reused])].float()
            for groups, order, reused in zip(layers, mask.order, mask.reused, strict=True)
            if reused
        ],
        dim=1,
    )


def _similarities(
    model: PackedModel, store: AttentionMapStore, probes: Probes, mask: ReuseMask
) -> dict[RecordKind, tuple[np.ndarray, np.ndarray]]:
    """Return predicted and true similarities of the nearest records: kind -> [probes with a record] each.

    The true similarity is 1 - α · mean total variation distance of the maps of the heads of `mask`.
    """
    found = {}
    for kind in RecordKind:
        served = np.flatnonzero(probes.records[kind] >= 0)
        true = np.zeros(len(served))
        for run in token_passes(probes.lengths[served].tolist()):
            indices = served[run]
            batch = pack([probes.sequences[index] for index in indices])
            donors = stored_maps(store, mask.order, batch, probes.records[kind][indices])
            maps = collect_maps(model, batch)
            total = np.zeros(len(indices))
            for layer, (order, reused) in enumerate(zip(mask.order, mask.reused, strict=True)):
                heads = list(order[:reused])
                for group, mine, theirs in zip(batch.groups(), maps[layer], donors[layer], strict=True):
                    away = (mine[:, heads].float() - theirs[:, heads].float()).abs().sum(dim=(1, 2, 3)) / 2
                    total[group.sequences] += away.cpu().numpy() / group.length
            true[run] = 1 - ALPHA * total / mask.total
        found[kind] = (probes.similarities[kind][served], true)
    return found
