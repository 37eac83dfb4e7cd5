"""LazyFormer and SAN: neighbouring layers share attention maps.

    layers in blocks -> the first layer of a block computes and keeps its maps
                     -> the other layers compute V, maps @ V and the rest: no Q, no K, no softmax

LazyFormer (Ying et al. 2021) has blocks of two layers. In SAN (Xiao et al. 2019), neighbouring layers share
maps if the Jensen-Shannon divergence of their maps, measured on a sample, is small. Both papers train models
with shared maps. Here, as with reuse from records, the model was trained without sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from attncache_core.calibration.substitution import token_passes, traced_forward
from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.models import PackedModel, model_shape
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import ReusePlan, no_reuse
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.runtime.devices import Dtype
from attncache_core.text.token_batch import Group, TokenBatch, pack


def lazyformer_blocks(layers: int, size: int = 2) -> list[range]:
    """Return blocks of `size` layers; the last block may be shorter. Blocks of one layer: the full model."""
    return [range(first, min(first + size, layers)) for first in range(0, layers, size)]


def san_blocks(divergences: np.ndarray, threshold: float) -> list[range]:
    """Return blocks in which neighbouring layers diverge by less than `threshold`. 0: the full model.

    divergences: [layers - 1], between the maps of each layer and the next (`layer_divergences`). As the
    AttnCache papers describe SAN, a layer joins the block of the previous layer if the divergence of these
    two layers is small. So in a long block, the last layer may diverge more than `threshold` from the first
    layer, which gives the maps.
    """
    starts = [0, *(np.flatnonzero(~(np.asarray(divergences) < threshold)) + 1).tolist()]
    ends = [*starts[1:], len(divergences) + 1]
    return [range(first, end) for first, end in zip(starts, ends, strict=True)]


def layer_divergences(model: PackedModel, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the divergence of the maps of each layer and the next: float64 [layers - 1], in nats, 0 to ln 2.

    The divergence is the Jensen-Shannon divergence of rows of maps, between heads of the same number: the
    mean over the heads and rows of a sequence, and then over sequences, so that long sequences do not count
    more than short sequences. The model must have no reuse mask.
    """
    compared = _NeighbouringLayers(len(model.layers))
    for indices in token_passes([len(sequence) for sequence in sequences]):
        traced_forward(model, pack([sequences[index] for index in indices]), compared)
    return compared.totals / len(sequences)


class _NeighbouringLayers:
    """Receives the maps of a full run layer by layer, and compares each layer with the previous layer."""

    def __init__(self, layers: int) -> None:
        self.totals = np.zeros(layers - 1)  # divergence, summed over sequences
        self._before: dict[Group, torch.Tensor] = {}

    def __call__(self, layer: int, group: Group, maps: torch.Tensor) -> None:
        if layer > 0:
            divergences = jensen_shannon(self._before.pop(group), maps)  # [n, heads, L]
            self.totals[layer - 1] += float(divergences.mean(dim=(1, 2)).sum())
        if layer < len(self.totals):
            self._before[group] = maps


def jensen_shannon(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence of distributions along the last axis, in nats, float64 [...].

    H((P + Q) / 2) - (H(P) + H(Q)) / 2. Rows are scaled to sum 1, because 16-bit rows do so only roughly.
    """
    left, right = (rows.double() / rows.double().sum(dim=-1, keepdim=True) for rows in (left, right))
    mixed = _entropy((left + right) / 2)
    return (mixed - (_entropy(left) + _entropy(right)) / 2).clamp(min=0)


def _entropy(rows: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(rows).sum(dim=-1)


class SharedLayers(ReuseStrategy):
    """A reuse strategy: all layers of a block take the maps of the block's first layer."""

    def __init__(self, blocks: Sequence[range], heads: int) -> None:
        """blocks: all layers of the model, in order. heads: number of heads of each layer."""
        self._sources = tuple(block.start for block in blocks for _ in block)
        self._heads = heads

    @property
    def mask(self) -> ReuseMask:
        """All heads of every layer except the first layers of blocks, so their Q and K are not computed."""
        order = (tuple(range(self._heads)),) * len(self._sources)
        return ReuseMask(
            order, tuple(0 if source == layer else self._heads for layer, source in enumerate(self._sources))
        )

    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> ReusePlan:
        """See ReuseStrategy.plan. All sequences share maps, whatever `allowed` says."""
        del allowed
        return replace(no_reuse(len(batch.lengths)), layer_sources=self._sources)


def shared_maps_engine(
    checkpoint: Checkpoint, blocks: Sequence[range], *, dtype: Dtype = "auto", threads: int | None = None
) -> PrefillEngine:
    """Load a checkpoint so that its layers share maps in blocks. dtype, threads: see PrefillEngine.load.

    Raises ValueError if the blocks are not the checkpoint's layers in order, and UnsupportedModel.
    """
    layers, heads = model_shape(checkpoint)
    if not all(blocks) or [layer for block in blocks for layer in block] != list(range(layers)):
        raise ValueError(f"the blocks are not the model's {layers} layers in order")
    return PrefillEngine.load(checkpoint, strategy=SharedLayers(blocks, heads), dtype=dtype, threads=threads)
