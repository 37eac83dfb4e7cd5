"""Where the layers of a pass get the maps that they do not compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from attncache_core.models import AttentionLayer
from attncache_core.native.stack_data import GivenRecords
from attncache_core.text.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class ComputedHeads:
    """The computed heads of one layer for a whole batch: their Q, K and V, and where maps @ V is written.

    The tensors are [tokens, computed heads, head_dim].
    """

    number: int  # of the layer
    layer: AttentionLayer
    batch: TokenBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: torch.Tensor


class GivenMaps(ABC):
    """Maps that are given to the first sequences of a batch, for the reused heads of each layer."""

    count: int  # number of sequences that get maps; they come first in the batch
    # Number of sequences, from the first, that take the model's refitted weights; at most `count`.
    refitted: int = 0

    def attend(self, heads: ComputedHeads) -> None:
        """Compute the maps of the computed heads of a layer, and write maps @ V to `heads.context`.

        For all sequences. A subclass may keep the maps for later layers.
        """
        computed, batch = slice(heads.layer.reused_heads, heads.layer.heads), heads.batch
        heads.layer.attend(
            heads.query, heads.key, heads.value, batch.offsets, computed, heads.context, batch.tree
        )

    def records(self) -> GivenRecords | None:
        """Return the records of the maps for the compiled stack; None if the stack cannot use them."""
        return None

    @abstractmethod
    def apply(self, number: int, value: torch.Tensor, context: torch.Tensor) -> None:
        """Write maps @ V of the reused heads of layer `number` to the rows of the first `count` sequences.

        value, context: [tokens, reused heads, head_dim] of the whole batch.
        """
