"""The interface through which the layers of a pass get the maps that they do not compute."""

from __future__ import annotations

from typing import Protocol

import torch

from attncache_core.models import AttentionLayer
from attncache_core.text.token_batch import TokenBatch


class GivenMaps(Protocol):
    """Maps that are given to the first sequences of a batch, for the reused heads of each layer.

    All tensors are [tokens, heads, head_dim] of the whole batch. The heads are the computed heads in
    `attend`, and the reused heads in `apply`.
    """

    count: int  # number of sequences that get maps; they come first in the batch

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
        """Compute the maps of the computed heads of layer `number`, and write maps @ V to `context`.

        For all sequences. An implementation may keep the maps for later layers.
        """
        ...

    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """Write maps @ V of the reused heads of layer `number` to the rows of the first `count` sequences."""
        ...


def attend_computed(
    layer: AttentionLayer,
    batch: TokenBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
) -> None:
    """Compute the maps of a layer's computed heads, and write maps @ V to `context`. Keeps no maps."""
    layer.attend(query, key, value, batch.offsets, slice(layer.reused_heads, layer.heads), context)
