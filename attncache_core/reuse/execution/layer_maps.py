"""Let layers reuse the maps of an earlier layer of the same pass, as in LazyFormer and SAN."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from attncache_core import native
from attncache_core.models import AttentionLayer
from attncache_core.models.attention import apply_maps
from attncache_core.models.blocks import BaseAttentionLayer
from attncache_core.reuse.execution.given_maps import ComputedHeads, GivenMaps
from attncache_core.text.token_batch import TokenBatch, by_sequence


def layer_maps(
    batch: TokenBatch,
    layer: AttentionLayer,
    sources: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> GivenMaps:
    """Return the maps that layers share in a batch.

    sources: for each layer the number of the layer whose maps it takes; its own number if it computes its
    maps. layer: any layer of the model. dtype, device: of the hidden states; they decide whether the kernel
    can be used.
    """
    kernel = native.kernel()
    products = isinstance(layer, BaseAttentionLayer) and layer.scores_are_products
    if kernel and kernel.supports(torch.empty(0, dtype=dtype, device=device)) and products:
        return _KernelMaps(kernel, batch, layer.heads, dtype, sources)
    return _OperatorMaps(batch, sources)


class _SharedMaps(GivenMaps):
    """Keeps the maps of the layers that later layers take them from."""

    def __init__(self, batch: TokenBatch, sources: Sequence[int]) -> None:
        self.count = len(batch.lengths)
        self._sources = sources
        self._shared = {source for layer, source in enumerate(sources) if source != layer}

    def attend(self, heads: ComputedHeads) -> None:
        """See GivenMaps.attend. Keeps the maps if a later layer takes them."""
        if heads.number not in self._shared:
            super().attend(heads)
            return
        self._keep(heads, needed=self._sources[heads.number :])

    @abstractmethod
    def _keep(self, heads: ComputedHeads, needed: Sequence[int]) -> None:
        """Compute and keep maps. needed: the layers with maps that this layer or a later layer uses."""


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

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """See GivenMaps.apply."""
        addresses = self._addresses(self._sources[number])
        self._kernel.apply_maps(addresses, self._dtype, self._sequences, value, self._offsets, context)

    def _keep(self, heads: ComputedHeads, needed: Sequence[int]) -> None:
        finished = [layer for layer in self._maps if layer not in needed]
        # The memory of maps that no later layer takes is used again.
        self._maps[heads.number] = (
            self._maps.pop(finished[0]) if finished else torch.empty(self._size, dtype=self._dtype)
        )
        mask = heads.layer.attention_mask
        self._kernel.attend(
            heads.query,
            heads.key,
            heads.value,
            self._offsets,
            mask.scale,
            heads.context,
            kept=self._addresses(heads.number),
            before=mask.before,
            after=mask.after,
        )

    def _addresses(self, layer: int) -> np.ndarray:
        maps = self._maps[layer]
        return maps.data_ptr() + self._starts * maps.element_size()


class _OperatorMaps(_SharedMaps):
    """Shared maps by torch's operators, for one group of equal lengths at a time."""

    def __init__(self, batch: TokenBatch, sources: Sequence[int]) -> None:
        super().__init__(batch, sources)
        self._groups = batch.groups()
        self._maps: dict[int, list[torch.Tensor]] = {}  # layer -> maps of each group, [n, heads, L, L]

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """See GivenMaps.apply."""
        for group, maps in zip(self._groups, self._maps[self._sources[number]], strict=True):
            by_sequence(context, group).copy_(apply_maps(maps, by_sequence(value, group)))

    def _keep(self, heads: ComputedHeads, needed: Sequence[int]) -> None:
        self._maps = {layer: maps for layer, maps in self._maps.items() if layer in needed}
        self._maps[heads.number] = [
            heads.layer.attention_maps(
                by_sequence(heads.query, group), by_sequence(heads.key, group), slice(heads.layer.heads)
            )
            for group in self._groups
        ]
        self.apply(heads.number, heads.value, heads.context)
