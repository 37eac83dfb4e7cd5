"""Any mask on one loaded model: every map is computed, and some are replaced by a donor's.

A probe is a sequence with a donor of its length, whose maps it takes. The model must have no reuse mask of
its own: heads count as the checkpoint numbers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from attncache_core.models import AttentionLayer, PackedModel
from attncache_core.models.attention import apply_maps
from attncache_core.tokens import Group, TokenBatch, by_sequence, pack

# Layer -> for each group of the batch the maps [n, heads, L, L].
BatchMaps = list[list[torch.Tensor]]
# Tokens in one pass over probes: enough to fill the processor, and 100 MB of maps at 128 tokens.
_TOKENS_PER_PASS = 4096


@dataclass(frozen=True)
class ProbeBatch:
    """Probes in packed order, computed in full, with the maps of their records."""

    batch: TokenBatch
    hidden: list[torch.Tensor]  # input of each layer, [tokens, hidden]
    outputs: np.ndarray  # float32 [sequences, d], the full model's: class logits, or representations
    donors: BatchMaps


def token_passes(lengths: Sequence[int], tokens: int = _TOKENS_PER_PASS) -> Iterator[list[int]]:
    """Indices of sequences, sorted by length, in runs of at most `tokens` tokens (or one sequence)."""
    run: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if run and total + lengths[index] > tokens:
            yield run
            run, total = [], 0
        run.append(index)
        total += lengths[index]
    if run:
        yield run


@torch.inference_mode()
def traced_forward(
    model: PackedModel, batch: TokenBatch, on_maps: Callable[[int, Group, torch.Tensor], None]
) -> tuple[list[torch.Tensor], np.ndarray]:
    """Run the full model, showing every group's maps of every layer to `on_maps(layer, group, maps)`.

    Returns the input of each layer and the outputs [sequences, d] (class logits where the model has any,
    else representations), both in packed order.
    """
    hidden = model.embed(batch)
    inputs = []
    for number, layer in enumerate(model.layers):
        inputs.append(hidden)
        hidden = _layer(layer, hidden, batch, partial(on_maps, number))
    return inputs, model.outputs(hidden, batch).rows.cpu().numpy()


@torch.inference_mode()
def substituted_outputs(
    model: PackedModel, probes: ProbeBatch, mask: np.ndarray, first_layer: int = 0
) -> np.ndarray:
    """Outputs [sequences, d] with the donors' maps for the heads in `mask`, bool [layers, heads].

    first_layer: the first layer with a head in the mask, where the caller knows it; what lies before is
    not computed again.
    """
    hidden = probes.hidden[first_layer]
    groups = probes.batch.groups()
    for number in range(first_layer, len(model.layers)):
        donors = dict(zip(groups, probes.donors[number], strict=True)) if mask[number].any() else {}
        hidden = _layer(model.layers[number], hidden, probes.batch, _Substitution(mask[number], donors))
    return model.outputs(hidden, probes.batch).rows.cpu().numpy()


@dataclass(frozen=True)
class _Substitution:
    """Replaces the maps of some heads of one layer by the donors'."""

    heads: np.ndarray  # bool [heads]
    donors: Mapping[Group, torch.Tensor]

    def __call__(self, group: Group, maps: torch.Tensor) -> None:
        if self.donors:
            chosen = torch.from_numpy(np.flatnonzero(self.heads))
            maps[:, chosen] = self.donors[group][:, chosen].to(maps)


def _layer(
    layer: AttentionLayer,
    hidden: torch.Tensor,
    batch: TokenBatch,
    on_maps: Callable[[Group, torch.Tensor], None],
) -> torch.Tensor:
    """One layer by way of explicit maps, which `on_maps` sees, and may change, before they are used."""
    value, query, key = layer.project(layer.attention_input(hidden), batch.positions)
    context = torch.empty_like(value)
    for group in batch.groups():
        maps = layer.attention_maps(by_sequence(query, group), by_sequence(key, group), slice(layer.heads))
        on_maps(group, maps)
        found = apply_maps(maps, by_sequence(value, group))
        by_sequence(context, group).copy_(found)
    return layer.finish(hidden, context)


def collect_maps(model: PackedModel, batch: TokenBatch) -> BatchMaps:
    """All maps of a batch."""
    maps: BatchMaps = [[] for _ in model.layers]
    traced_forward(model, batch, lambda layer, _, group_maps: maps[layer].append(group_maps))
    return maps


def probed(model: PackedModel, batch: TokenBatch, donors: BatchMaps) -> ProbeBatch:
    """A packed batch of probes computed in full, beside the maps of their records."""
    hidden, outputs = traced_forward(model, batch, lambda *_: None)
    return ProbeBatch(batch, hidden, outputs, donors)


def paired(
    model: PackedModel, probes: Sequence[Sequence[int]], donors: Sequence[Sequence[int]]
) -> list[Callable[[], ProbeBatch]]:
    """Makers of probe batches; donors[i] is the token sequence, of its length, whose maps probe i takes."""

    def make(places: Sequence[int]) -> ProbeBatch:
        # The places are sorted by length: packing keeps their order, and donors stand where their probes do.
        maps = collect_maps(model, pack([donors[place] for place in places]))
        return probed(model, pack([probes[place] for place in places]), maps)

    return [partial(make, places) for places in token_passes([len(probe) for probe in probes])]
