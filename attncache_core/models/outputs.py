"""The outputs of a model, which are made from the states of its last layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from attncache_core.heads.pooling import Pooler
from attncache_core.models.compiled import native_norm
from attncache_core.models.linear import Norm
from attncache_core.native.pooling import NativeNorm
from attncache_core.text.token_batch import TokenBatch


class Head(NamedTuple):
    """A sequence-classification head."""

    read: Callable[[torch.Tensor], torch.Tensor]  # pooled vectors [n, hidden] -> input of `score`
    score: nn.Module  # -> logits [n, classes]
    pool: Pooler = Pooler(("cls",))


class Outputs:
    """The outputs of a model: a norm, then pooled embeddings or the logits of its classification head."""

    def __init__(self, pool: Pooler, head: Head | None, norm: nn.Module | Norm | None = None) -> None:
        """pool: of the model without a head. norm: of each token, before pooling."""
        self.pool, self._head, self.norm = pool if head is None else head.pool, head, norm
        self._native: NativeNorm | None = None
        if norm is not None:
            weight = norm.weight if isinstance(norm, Norm) else next(norm.parameters())
            self._dtype, self._native = weight.dtype, native_norm(norm, weight.device)

    @property
    def finishes(self) -> bool:
        """Whether `of_vectors` changes the vectors."""
        return self._head is not None or self.pool.head is not None

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return the rows that a caller receives, float32 [sequences, d], in packed order.

        hidden: the last layer's output [tokens, hidden], of the model's dtype or float32.
        """
        if self.pool.modes == ("lasttoken",):
            return self.of_vectors(self.states(hidden[torch.from_numpy(batch.last_rows)]))
        return self.of_vectors(self.pool(self.states(hidden), batch))

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what pooling reads from the last layer's output, float32 [tokens, hidden]."""
        if self.norm is None:
            return hidden.float()
        return self._native(hidden) if self._native else self.norm(hidden.to(self._dtype)).float()

    def of_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the rows that a caller receives, float32 [n, d], from pooled vectors, float32 [n, width]."""
        if self._head is None:
            return vectors if self.pool.head is None else self.pool.head(vectors)
        read = self._head.read(vectors.to(next(self._head.score.parameters()).dtype))
        return self._head.score(read).float()
