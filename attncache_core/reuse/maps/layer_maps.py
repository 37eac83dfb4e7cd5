"""Let layers reuse the maps of an earlier layer of the same pass, as in LazyFormer and SAN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attncache_core import native
from attncache_core.models import AttentionLayer
from attncache_core.models.attention import apply_maps
from attncache_core.models.blocks import BaseAttentionLayer
from attncache_core.reuse.given_maps import GivenMaps, attend_computed
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
    """The layers whose maps must be kept for later layers."""

    def __init__(self, batch: TokenBatch, sources: Sequence[int]) -> None:
        self.count = len(batch.lengths)
        self._kept = {source for layer, source in enumerate(sources) if source != layer}


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
        self._sequences = np.arange(len(batch.lengths) + 1)  # runs of one sequence: none share their maps
        starts = np.concatenate(([0], np.cumsum(heads * batch.lengths**2)))
        self._maps = torch.empty(int(starts[-1]), dtype=dtype)
        self._addresses = self._maps.data_ptr() + starts[:-1] * self._maps.element_size()

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
        if number not in self._kept:
            attend_computed(layer, batch, query, key, value, context)
            return
        self._kernel.attend(
            query,
            key,
            value,
            self._offsets,
            layer.attention_mask.scale,
            context,
            kept=self._addresses,
            before=layer.attention_mask.before,
            after=layer.attention_mask.after,
        )

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """See GivenMaps.apply."""
        del number  # only the maps of one layer are kept at a time
        self._kernel.apply_maps(
            self._addresses, self._maps.dtype, self._sequences, value, self._offsets, context
        )


class _OperatorMaps(_SharedMaps):
    """Shared maps by torch's operators, for one group of equal lengths at a time."""

    def __init__(self, batch: TokenBatch, sources: Sequence[int]) -> None:
        super().__init__(batch, sources)
        self._groups = batch.groups()
        self._maps: list[torch.Tensor] = []  # maps of each group, [n, heads, L, L]

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
        if number not in self._kept:
            attend_computed(layer, batch, query, key, value, context)
            return
        self._maps = [
            layer.attention_maps(by_sequence(query, group), by_sequence(key, group), slice(layer.heads))
            for group in self._groups
        ]
        self.apply(number, value, context)

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """See GivenMaps.apply."""
        del number  # only the maps of one layer are kept at a time
        for group, maps in zip(self._groups, self._maps, strict=True):
            by_sequence(context, group).copy_(apply_maps(maps, by_sequence(value, group)))
