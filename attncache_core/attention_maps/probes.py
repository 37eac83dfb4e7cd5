"""Probes: sequences that are not recorded, and what their nearest records would do to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from attncache_core.attention_maps.mask import ReuseMask
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.attention_maps.store import AttentionMapStore, RecordKind
from attncache_core.attention_maps.substitution import (
    BatchMaps,
    ProbeBatch,
    probed,
    substituted_outputs,
    token_passes,
)
from attncache_core.models import PackedModel
from attncache_core.outputs import Judge, cosines
from attncache_core.tokens import TokenBatch, pack


@dataclass(frozen=True)
class Probes:
    """Sequences that are not recorded, lengths rising, and their nearest record of each kind."""

    sequences: list[list[int]]
    records: dict[RecordKind, np.ndarray]  # int64 [probes], -1 for none
    similarities: dict[RecordKind, np.ndarray]  # float32 [probes], -inf for none

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each, int64 [probes]."""
        return np.array([len(sequence) for sequence in self.sequences], dtype=np.int64)

    def most_similar(self) -> np.ndarray:
        """The nearest record of any kind, int64 [probes]."""
        kinds = np.argmax([self.similarities[kind] for kind in RecordKind], axis=0)
        return np.choose(kinds, [self.records[kind] for kind in RecordKind])

    def sample(self, most: int) -> Probes:
        """About `most` of the probes, spread evenly over their lengths."""
        places = np.unique(np.linspace(0, len(self.sequences) - 1, most).round().astype(int))
        return Probes(
            [self.sequences[place] for place in places],
            {kind: records[places] for kind, records in self.records.items()},
            {kind: similarities[places] for kind, similarities in self.similarities.items()},
        )


@dataclass(frozen=True)
class Measured:
    """What happens to each probe if its record of one kind serves it, under one mask."""

    damage: np.ndarray  # float64 [probes], 1 - cosine
    fidelity: np.ndarray  # float64 [probes], in the budget's measure: cosine, or 1 for the same decision


@torch.inference_mode()
def find_probes(model: PackedModel, search: SearchEngine, sequences: Sequence[Sequence[int]]) -> Probes:
    """The probes of these sequences; what the policy of `search` says does not matter."""
    ordered = sorted((list(sequence) for sequence in sequences), key=len)
    records = {kind: np.full(len(ordered), -1) for kind in RecordKind}
    similarities = {kind: np.full(len(ordered), -np.inf, dtype=np.float32) for kind in RecordKind}
    for places in token_passes([len(sequence) for sequence in ordered]):
        batch = pack([ordered[place] for place in places])
        groups = batch.groups()
        found = search.nearest(batch, model.search_input(model.embed(batch)), groups)
        for kind in RecordKind:
            records[kind][places] = found.records[kind]
            similarities[kind][places] = found.similarities[kind]
    return Probes(ordered, records, similarities)


def measure(
    model: PackedModel,
    store: AttentionMapStore,
    probes: Probes,
    masks: Sequence[ReuseMask],
    judge: Judge,
    on_pass: Callable[[int, int], None] = lambda *_: None,
    kinds: Sequence[RecordKind] = tuple(RecordKind),
) -> list[dict[RecordKind, Measured]]:
    """For each mask and kind what reuse does to each probe; nothing (nan) where it has no such record.

    kinds: those that are measured; the others are left at nan.
    """
    count = len(probes.sequences)
    result = [
        {kind: Measured(np.full(count, np.nan), np.full(count, np.nan)) for kind in RecordKind} for _ in masks
    ]
    batches = [
        (kind, places, make)
        for kind in kinds
        for places, make in stored_batches(model, store, masks[0].order, probes, probes.records[kind])
    ]
    for done, (kind, places, make) in enumerate(batches, 1):
        measured = make()
        full = judge.comparable(measured.outputs)
        for mask, rows in zip(masks, result, strict=True):
            changed = substituted_outputs(model, measured, mask.as_array())
            # Never below zero by rounding: nothing does less damage than a sequence's own record.
            rows[kind].damage[places] = np.maximum(1 - cosines(judge.comparable(changed), full), 0)
            rows[kind].fidelity[places] = judge.fidelity(changed, measured.outputs)
        on_pass(done, len(batches))
    return result


def stored_batches(
    model: PackedModel,
    store: AttentionMapStore,
    order: Sequence[Sequence[int]],
    probes: Probes,
    records: np.ndarray,
) -> list[tuple[np.ndarray, Callable[[], ProbeBatch]]]:
    """The probes that have a record (`records` int64 [probes], -1 for none): their places, and their makers.

    order: layer -> the heads as the records hold them.
    """

    def make(places: np.ndarray) -> ProbeBatch:
        batch = pack([probes.sequences[place] for place in places])
        return probed(model, batch, stored_maps(store, order, batch, records[places]))

    served = np.flatnonzero(records >= 0)
    passes = [served[chosen] for chosen in token_passes(probes.lengths[served].tolist())]
    return [(places, partial(make, places)) for places in passes]


def stored_maps(
    store: AttentionMapStore, order: Sequence[Sequence[int]], batch: TokenBatch, records: np.ndarray
) -> BatchMaps:
    """The records' maps for a packed batch, heads as the checkpoint numbers them, zero if not stored."""
    layers: BatchMaps = []
    for layer, heads in enumerate(order):
        held = store.layout.stored_heads[layer]
        layers.append([])
        for group in batch.groups():
            numbers = torch.from_numpy(records[group.sequences])
            gathered = store.segments[group.length].gather_layer_maps(numbers, layer, held)
            maps = torch.zeros(group.count, len(heads), *gathered.shape[2:], dtype=gathered.dtype)
            maps[:, list(heads[:held])] = gathered
            layers[-1].append(maps)
    return layers
