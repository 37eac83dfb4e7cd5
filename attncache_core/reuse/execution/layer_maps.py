"""Let layers reuse the maps of an earlier layer of the same pass, as in LazyFormer and SAN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attncache_core import native
from attncache_core.models import AttentionLayer
from attncache_core.models.attention import apply_maps
from attncache_core.models.blocks import BaseAttentionLayer
from attncache_core.reuse.execution.given_maps import GivenMaps, attend_computed
from attncache_core.text.token_batch import TokenBatch, by_sequence


def layer_maps(
    batch: TokenBatch, layer: AttentionLayer, sources: Sequence[int], like: torch.Tensor
) -> GivenMaps:
    """Return the maps that layers share in a batch.

    sources: for each layer the number of the layer whose maps it takes; its own number if it computes its
    maps. layer: any layer of the model. like: hidden states; their dtype and device decide whether the kernel
    can be used.
    """
    kernel = native.kernel()
    products = isinstance(layer, BaseAttentionLayer) and layer.scores_are_products
    if kernel and kernel.supports(like) and products:
        return _KernelMaps(kernel, batch, layer.heads, like.dtype, sources)
    return _OperatorMaps(batch, sources)


class _SharedMaps:
    """Knows for each layer the layer that computes its maps."""

    def __init__(self, batch: TokenBatch, sources: Sequence[int]) -> None:
        self.count = len(batch.lengths)
        self._sources = sources
        self._shared = {source for layer, source in enumerate(sources) if source != layer}


class _KernelMaps(_SharedMaps):
    """Shared maps by the kernel: it writes the maps to memory in the dtype of V and reads them in place."""

    def __init__(
        self,
        kernel: native.AttentionKernel,
        batch: TokenBatch,
        heads: int,
        dtype: torch.dtype,
        sources: Sequence[int],
    ) -> None:
        super().__init__(batch, sources)
        self._kernel, self._offsets = kernel, batch.offsets
        self._sequences = np.arange(len(batch.lengths) + 1)  # one run per sequence: no two share maps
        starts = np.concatenate(([0], np.cumsum(heads * batch.lengths**2)))
        self._starts, self._size = starts[:-1], int(starts[-1])  # in elements
        self._dtype = dtype
        self._maps: dict[int, torch.Tensor] = {}  # layer -> its maps, sequence after sequence

    def _addresses(self, layer: int) -> np.ndarray:
        maps = self._maps[layer]
        return maps.data_ptr() + self._starts * maps.element_size()

    def attend(
        self,
        number: int,
        layer: AttentionLayer,
        batch: TokenBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: torch.Tensor,
    ) -> None:
        """See GivenMaps.attend."""
        if number not in self._shared:
            attend_computed(layer, batch, query, key, value, context)
            return
        # The maps of one block are no longer needed when the next block computes its own.
        finished = [kept for kept in self._maps if kept not in self._sources[number:]]
        self._maps[number] = (
            self._maps.pop(finished[0]) if finished else torch.empty(self._size, dtype=self._dtype)
        )
        self._kernel.attend(
            query,
            key,
            value,
            self._offsets,
            layer.attention_mask.scale,
            context,
            kept=self._addresses(number),
            before=layer.attention_mask.before,
            after=layer.attention_mask.after,
        )

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """See GivenMaps.apply."""
        addresses = self._addresses(self._sources[number])
        self._kernel.apply_maps(addresses, self._dtype, self._sequences, value, self._offsets, context)


class _OperatorMaps(_SharedMaps):
    """Shared maps by torch's operators, for one group of equal lengths at a time."""

    def __init__(self, batch: TokenBatch, sources: Sequence[int]) -> None:
        super().__init__(batch, sources)
        self._groups = batch.groups()
        self._maps: dict[int, list[torch.Tensor]] = {}  # layer -> maps of each group, [n, heads, L, L]

    def attend(
        self,
        number: int,
        layer: AttentionLayer,
        batch: TokenBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: torch.Tensor,
    ) -> None:
        """See GivenMaps.attend."""
        if number not in self._shared:
            attend_computed(layer, batch, query, key, value, context)
            return
        self._maps = {kept: maps for kept, maps in self._maps.items() if kept in self._sources[number:]}
        self._maps[number] = [
            layer.attention_maps(by_sequence(query, group), by_sequence(key, group), slice(layer.heads))
            for group in self._groups
        ]
        self._write(number, value, context)

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """See GivenMaps.apply."""
        self._write(self._sources[number], value, context)

    def _write(self, source: int, value: torch.Tensor, context: torch.Tensor) -> None:
        for group, maps in zip(self._groups, self._maps[source], strict=True):
            by_sequence(context, group).copy_(apply_maps(maps, by_sequence(value, group)))
