"""LazyFormer and SAN: neighbouring layers share attention maps.

    layers in blocks -> the first layer of a block computes and keeps its maps
                     -> the other layers compute V, maps @ V and the rest: no Q, no K, no softmax

LazyFormer (Ying et al. 2021) has blocks of two layers. In SAN (Xiao et al. 2019), neighbouring layers share
maps if the Jensen-Shannon divergence of their maps, measured on a sample, is small. Both papers train models
with shared maps. Here, as with reuse from records, the model was trained without sharing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from attncache_core import native
from attncache_core.calibration.substitution import token_passes, traced_forward
from attncache_core.checkpoints.checkpoint import Checkpoint, Dtype
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.models import AttentionLayer, PackedModel, model_shape
from attncache_core.models.attention import apply_maps
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import ReusePlan, no_reuse
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.text.prefix_tree import PrefixTree
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


class _Takers(ReuseStrategy):
    """All heads of the layers that take maps, so that an engine is loaded without computing their Q and K."""

    def __init__(self, sources: Sequence[int], heads: int) -> None:
        self._sources, self._heads = sources, heads

    @property
    def mask(self) -> ReuseMask:
        """See ReuseStrategy.mask."""
        order = (tuple(range(self._heads)),) * len(self._sources)
        return ReuseMask(
            order, tuple(0 if source == layer else self._heads for layer, source in enumerate(self._sources))
        )

    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> ReusePlan:
        """See ReuseStrategy.plan. No maps of records are given."""
        del allowed
        return no_reuse(len(batch.lengths))


class _Maps(threading.local):
    """The maps of the block that a thread computes."""

    packed = torch.empty(0)  # sequence after sequence
    grouped: Sequence[torch.Tensor] = ()  # [n, heads, L, L] of each run of sequences of one length


class SharingLayer:
    """A layer of a block: the first one keeps its maps, the others take them and have no Q and K.

    The compiled stack shares no maps, and runs no layers of other types than AttentionLayer.
    """

    reused_heads = 0  # for the engine, which gives no maps

    def __init__(self, layer: AttentionLayer, takes: bool, maps: _Maps) -> None:
        self.takes, self._layer, self._maps = takes, layer, maps

    def __getattr__(self, name: str) -> Any:
        """Return what is as in the layer itself."""
        return getattr(self._layer, name)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: np.ndarray,
        heads: slice,
        context: torch.Tensor,
        tree: PrefixTree | None = None,
    ) -> None:
        """See AttentionLayer. query, key: of no heads if the layer takes maps. tree: None."""
        del tree
        layer, kernel = self._layer, native.kernel()
        if kernel and layer.score_terms is None and kernel.supports(value):
            self._attend_by_kernel(kernel, query, key, value, offsets, context)
            return
        lengths = np.diff(offsets)
        starts = [*np.flatnonzero(np.diff(lengths, prepend=-1)).tolist(), len(lengths)]
        groups = [
            (slice(offsets[first], offsets[end]), (-1, int(lengths[first])))
            for first, end in pairwise(starts)
        ]
        if not self.takes:
            self._maps.grouped = [
                layer.attention_maps(query[rows].unflatten(0, shape), key[rows].unflatten(0, shape), heads)
                for rows, shape in groups
            ]
        for (rows, shape), maps in zip(groups, self._maps.grouped, strict=True):
            context[rows] = apply_maps(maps, value[rows].unflatten(0, shape)).flatten(0, 1).to(context.dtype)

    def _attend_by_kernel(
        self,
        kernel: native.AttentionKernel,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        offsets: np.ndarray,
        context: torch.Tensor,
    ) -> None:
        """Write the maps to memory in the dtype of V, or read them in place."""
        lengths = np.diff(offsets)
        ends = np.cumsum(self._layer.heads * lengths**2)  # in elements
        if not self.takes and (len(self._maps.packed) != ends[-1] or self._maps.packed.dtype != value.dtype):
            self._maps.packed = torch.empty(int(ends[-1]), dtype=value.dtype)
        maps = self._maps.packed
        addresses = maps.data_ptr() + np.concatenate(([0], ends[:-1])) * maps.element_size()
        if self.takes:
            alone = np.arange(len(lengths) + 1)  # one run per sequence: no two share maps
            kernel.apply_maps(addresses, value.dtype, alone, value, offsets, context)
        else:
            mask = self._layer.attention_mask
            bounds = {"before": mask.before, "after": mask.after}
            kernel.attend(query, key, value, offsets, mask.scale, context, kept=addresses, **bounds)


def shared_maps_engine(
    checkpoint: Checkpoint, blocks: Sequence[range], *, dtype: Dtype = "auto", threads: int | None = None
) -> PrefillEngine:
    """Load a checkpoint so that its layers share maps in blocks. dtype, threads: see PrefillEngine.load.

    Raises ValueError if the blocks are not the checkpoint's layers in order, and UnsupportedModel.
    """
    layers, heads = model_shape(checkpoint)
    if not all(blocks) or [layer for block in blocks for layer in block] != list(range(layers)):
        raise ValueError(f"the blocks are not the model's {layers} layers in order")
    sources = [block.start for block in blocks for _ in block]
    engine = PrefillEngine.load(
        checkpoint, strategy=_Takers(sources, heads), dtype=dtype, threads=threads, share_prefixes=False
    )
    maps = _Maps()
    sharing = [
        # A layer in a block of its own is as it was.
        SharingLayer(layer, number != source, maps) if sources.count(source) > 1 else layer
        for number, (source, layer) in enumerate(zip(sources, engine.model.layers, strict=True))
    ]
    model = replace(engine.model, layers=cast(list[AttentionLayer], sharing))
    return replace(engine, model=model, strategy=None)
