"""Find the nearest records of probes, and measure the damage that reusing these records does.

A probe is a sequence without a record of its own.

sequences -> find_probes -> Probes (nearest record of each kind) -> measure -> Measured per mask and kind
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch

from attncache_core.calibration.substitution import (
    BatchMaps,
    ProbeBatch,
    probed,
    substituted_outputs,
    token_passes,
    traced_forward,
)
from attncache_core.heads.comparator import OutputComparator
from attncache_core.heads.vectors import cosines
from attncache_core.models import PackedModel
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.text.token_batch import TokenBatch, pack


@dataclass(frozen=True)
class Probes:
    """Sequences without a record of their own, lengths rising, and their nearest record of each kind."""

    sequences: list[list[int]]
    records: dict[RecordKind, np.ndarray]  # record numbers, int64 [probes], -1 for none
    similarities: dict[RecordKind, np.ndarray]  # float32 [probes], -inf for none
    # Outputs of the full model, float32 [d], by probe: each is computed once for all masks and kinds.
    full: dict[int, np.ndarray] = field(default_factory=dict)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each probe, int64 [probes]."""
        return np.array([len(sequence) for sequence in self.sequences], dtype=np.int64)

    def most_similar(self) -> np.ndarray:
        """Return the nearest record of any kind, int64 [probes], -1 for none."""
        kinds = np.argmax([self.similarities[kind] for kind in RecordKind], axis=0)
        return np.choose(kinds, [self.records[kind] for kind in RecordKind])

    def full_outputs(self, model: PackedModel, indices: np.ndarray) -> np.ndarray:
        """Return the outputs of probes in full, float32 [n, d]. indices: int64 [n], lengths rising.

        model: the same one in every call.
        """
        if unknown := [index for index in indices.tolist() if index not in self.full]:
            batch = pack([self.sequences[index] for index in unknown])
            self.full.update(zip(unknown, traced_forward(model, batch, lambda *_: None)[1], strict=True))
        return np.stack([self.full[index] for index in indices.tolist()])

    def sample(self, maximum: int) -> Probes:
        """Return at most `maximum` of the probes, spread evenly over their lengths."""
        return self.at(np.unique(np.linspace(0, len(self.sequences) - 1, maximum).round().astype(int)))

    def at(self, indices: np.ndarray) -> Probes:
        """Return the probes with these indices, int64 [n], rising."""
        return Probes(
            [self.sequences[index] for index in indices],
            {kind: records[indices] for kind, records in self.records.items()},
            {kind: similarities[indices] for kind, similarities in self.similarities.items()},
        )


@dataclass(frozen=True)
class Measured:
    """The effect of one mask on each probe if the nearest record of one kind serves the probe."""

    damage: np.ndarray  # float64 [probes], 1 - cosine
    # float64 [probes], in the budget's measure: cosine, or 1 if the decision stays and 0 if not
    fidelity: np.ndarray


# Returns the input of the first layer's attention for sequences of one length, float32 [n, L, hidden].
InputsOf = Callable[[Sequence[Sequence[int]]], torch.Tensor]


@torch.inference_mode()
def find_probes(
    model: PackedModel,
    search: SearchEngine,
    sequences: Sequence[Sequence[int]],
    inputs_of: InputsOf | None = None,
) -> Probes:
    """Return the sequences as probes, with their nearest records. The policy of `search` has no effect.

    inputs_of: returns first-layer inputs that were computed before; None: the model computes the inputs.
    """
    ordered = sorted((list(sequence) for sequence in sequences), key=len)
    records = {kind: np.full(len(ordered), -1) for kind in RecordKind}
    similarities = {kind: np.full(len(ordered), -np.inf, dtype=np.float32) for kind in RecordKind}
    for indices in token_passes([len(sequence) for sequence in ordered]):
        chosen = [ordered[index] for index in indices]
        batch = pack(chosen)
        groups = batch.groups()
        if inputs_of is None:
            hidden = model.search_input(model.embed(batch))
        else:
            hidden = torch.cat([inputs_of(chosen[group.sequences]).flatten(0, 1) for group in groups])
        found = search.nearest(batch, hidden, groups)
        for kind in RecordKind:
            records[kind][indices] = found.records[kind]
            similarities[kind][indices] = found.similarities[kind]
    return Probes(ordered, records, similarities)


@torch.inference_mode()
def measure(
    model: PackedModel,
    store: AttentionMapStore,
    probes: Probes,
    masks: Sequence[ReuseMask],
    comparator: OutputComparator,
    on_pass: Callable[[int, int], None] = lambda *_: None,
    kinds: Sequence[RecordKind] = tuple(RecordKind),
    hit_model: PackedModel | None = None,
) -> list[dict[RecordKind, Measured]]:
    """Return the damage and fidelity of each probe, for each mask and kind of record.

    The values are nan for probes without a record of the kind. kinds: the kinds to measure; the values of
    other kinds are nan. on_pass: called after each batch with the batches done and in total. hit_model: the
    model with the weights that hits take; None: hits take those of `model`.
    """
    count = len(probes.sequences)
    result = [
        {kind: Measured(np.full(count, np.nan), np.full(count, np.nan)) for kind in RecordKind} for _ in masks
    ]
    batches = [(kind, indices) for kind in kinds for indices in _passes(probes, probes.records[kind])]
    for done, (kind, indices) in enumerate(batches, 1):
        batch = pack([probes.sequences[index] for index in indices])
        donors = stored_maps(store, masks[0].order, batch, probes.records[kind][indices])
        served = ProbeBatch(batch, [model.embed(batch)], probes.full_outputs(model, indices), donors)
        full = comparator.comparable(served.outputs)
        for mask, rows in zip(masks, result, strict=True):
            changed = substituted_outputs(hit_model or model, served, mask.as_array())
            # Rounding can give a cosine above 1, but damage is never negative.
            rows[kind].damage[indices] = np.maximum(1 - cosines(comparator.comparable(changed), full), 0)
            rows[kind].fidelity[indices] = comparator.fidelity(changed, served.outputs)
        on_pass(done, len(batches))
    return result


def stored_batches(
    model: PackedModel,
    store: AttentionMapStore,
    order: Sequence[Sequence[int]],
    probes: Probes,
    records: np.ndarray,
) -> list[Callable[[], ProbeBatch]]:
    """Return functions that each compute one batch of the probes that have a record, in their order.

    order: layer -> the heads in the order of the records. records: the donor of each probe, int64 [probes],
    -1 for none.
    """

    def make(indices: np.ndarray) -> ProbeBatch:
        batch = pack([probes.sequences[index] for index in indices])
        return probed(model, batch, stored_maps(store, order, batch, records[indices]))

    return [partial(make, indices) for indices in _passes(probes, records)]


def _passes(probes: Probes, records: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the probes that have a record, in batches of limited size."""
    served = np.flatnonzero(records >= 0)
    return [served[chosen] for chosen in token_passes(probes.lengths[served].tolist())]


def stored_maps(
    store: AttentionMapStore, order: Sequence[Sequence[int]], batch: TokenBatch, records: np.ndarray
) -> BatchMaps:
    """Read the maps of one record for each sequence of a packed batch.

    records: int64 [sequences]. Heads are in the order of the checkpoint. The maps of heads that records do
    not hold are zero.
    """
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
