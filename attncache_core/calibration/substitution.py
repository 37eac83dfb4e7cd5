"""Simulate any reuse mask on one loaded model: compute all maps, and replace some by the maps of a donor.

A probe is a sequence. Its donor is a sequence or record of the same length, and the donor's maps replace the
probe's maps in the heads of the mask. The model must be loaded without a reuse mask, so that its heads are in
the order of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from attncache_core.corpus.reading import neighbours
from attncache_core.engine.layers import run_layers
from attncache_core.models import PackedModel
from attncache_core.models.attention import apply_maps
from attncache_core.reuse.execution.reused_maps import ComputedHeads, ReusedMaps
from attncache_core.text.token_batch import Group, TokenBatch, by_sequence, pack

# For each layer, for each group of the batch: maps [n, heads, L, L].
BatchMaps = list[list[torch.Tensor]]
# Tokens per pass over probes. This number keeps the processor busy and needs 100 MB for maps at 128 tokens.
_TOKENS_PER_PASS = 4096


@dataclass(frozen=True)
class ProbeBatch:
    """Probes in packed order, their full computation, and the maps of their donors."""

    batch: TokenBatch
    hidden: list[torch.Tensor]  # input of each layer, [tokens, hidden]
    outputs: np.ndarray  # float32 [sequences, d], full computation: class logits or representations
    donors: BatchMaps


def token_passes(lengths: Sequence[int], tokens: int = _TOKENS_PER_PASS) -> Iterator[list[int]]:
    """Return the indices of sequences, sorted by length, in lists of at most `tokens` tokens.

    A sequence that is longer than `tokens` is alone in its list.
    """
    ordered = sorted(range(len(lengths)), key=lengths.__getitem__)
    return neighbours(ordered, lengths.__getitem__, tokens)


# Called with (layer, group, maps [n, heads, L, L]). The callee may change the maps in place.
OnMaps = Callable[[int, Group, torch.Tensor], None]


class ObservedMaps(ReusedMaps):
    """A map source that computes every map and passes it to a callback before its use; see ReusedMaps.

    The callback may change the maps. The model must be loaded without a reuse mask.
    """

    count = 0

    def __init__(self, on_maps: OnMaps) -> None:
        self._on_maps = on_maps

    def attend(self, heads: ComputedHeads) -> None:
        """See ReusedMaps.attend."""
        layer = heads.layer
        for group in heads.batch.groups():
            query, key, value, context = (
                by_sequence(x, group) for x in (heads.query, heads.key, heads.value, heads.context)
            )
            maps = layer.attention_maps(query, key, slice(layer.heads))
            self._on_maps(heads.number, group, maps)
            context.copy_(apply_maps(maps, value))

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """Never called, because no maps are given."""
        del number, value, context
        raise AssertionError("the model has a reuse mask")


@torch.inference_mode()
def traced_forward(
    model: PackedModel, batch: TokenBatch, on_maps: OnMaps
) -> tuple[list[torch.Tensor], np.ndarray]:
    """Run the full model, and call `on_maps` with the maps of every group in every layer.

    Returns the input of each layer, [tokens, hidden], and the outputs, float32 [sequences, d] (class logits
    if the model has classes, else representations), both in packed order.
    """
    observed, hidden = ObservedMaps(on_maps), model.embed(batch)
    inputs = []
    for number in range(len(model.layers)):
        inputs.append(hidden)
        hidden, _ = run_layers(model, batch, hidden, observed, range(number, number + 1))
    return inputs, model.outputs(hidden, batch).cpu().numpy()


@torch.inference_mode()
def substituted_outputs(
    model: PackedModel, probes: ProbeBatch, mask: np.ndarray, first_layer: int = 0
) -> np.ndarray:
    """Return the outputs, float32 [sequences, d], if donors' maps replace the maps of the heads in `mask`.

    mask: bool [layers, heads]. first_layer: no earlier layer may have a head in the mask. Layers before
    first_layer are not computed again.
    """
    donors = [dict(zip(probes.batch.groups(), maps, strict=True)) for maps in probes.donors]

    def substitute(layer: int, group: Group, maps: torch.Tensor) -> None:
        heads = torch.from_numpy(np.flatnonzero(mask[layer]))
        if len(heads):
            maps[:, heads] = donors[layer][group][:, heads].to(maps)

    layers = range(first_layer, len(model.layers))
    hidden, _ = run_layers(model, probes.batch, probes.hidden[first_layer], ObservedMaps(substitute), layers)
    return model.outputs(hidden, probes.batch).cpu().numpy()


def collect_maps(model: PackedModel, batch: TokenBatch) -> BatchMaps:
    """Return all maps of a batch."""
    maps: BatchMaps = [[] for _ in model.layers]
    traced_forward(model, batch, lambda layer, _, group_maps: maps[layer].append(group_maps))
    return maps


def probed(model: PackedModel, batch: TokenBatch, donors: BatchMaps) -> ProbeBatch:
    """Compute a packed batch of probes in full, and return the results with the maps of the donors."""
    hidden, outputs = traced_forward(model, batch, lambda *_: None)
    return ProbeBatch(batch, hidden, outputs, donors)


def paired(
    model: PackedModel, probes: Sequence[Sequence[int]], donors: Sequence[Sequence[int]]
) -> list[Callable[[], ProbeBatch]]:
    """Return functions that each compute one batch of probes.

    donors[i]: the token sequence that gives its maps to probe i, of the same length.
    """

    def make(indices: Sequence[int]) -> ProbeBatch:
        # The indices are sorted by length, so packing keeps their order and row i of both batches is a pair.
        maps = collect_maps(model, pack([donors[index] for index in indices]))
        return probed(model, pack([probes[index] for index in indices]), maps)

    return [partial(make, indices) for indices in token_passes([len(probe) for probe in probes])]
