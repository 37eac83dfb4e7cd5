"""The input of the first layer, described once as data; compiled.py hands the description to the stack."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from attncache_core.models.linear import Norm
from attncache_core.text.token_batch import TokenBatch


@dataclass(frozen=True, eq=False)
class Embedding:
    """The embedding of a token's id, plus one row for its position and its type, then a norm."""

    words: nn.Module
    norm: Norm | None = None
    # [positions * types, hidden], position after position; without positions or types, it counts one row.
    added: torch.Tensor | None = None
    has_positions: bool = False
    types: int = 1  # a token without a type has the first type
    padding: int | None = None  # see _counted_positions; None: positions count from 0
    projection: nn.Module | None = None  # of the sum, before the norm

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        """Return the first layer's input, [tokens, hidden]."""
        embedded: torch.Tensor = self.words(batch.ids)
        if self.added is not None:
            rows = self._rows(batch)
            embedded.add_(self.added[:1] if rows is None else torch.embedding(self.added, rows))
        if self.projection is not None:
            embedded = self.projection(embedded)
        return embedded if self.norm is None else self.norm(embedded)

    def _rows(self, batch: TokenBatch) -> torch.Tensor | None:
        """Return the row of each token in the table that is added, int64 [tokens]; None: row 0.

        Raises IndexError for a type that the model does not have.
        """
        types = batch.types
        if types is not None and not (types.min() >= 0 and types.max() < self.types):
            raise IndexError(f"the model has no such type of tokens; its types are below {self.types}")
        if not self.has_positions:
            return types
        positions = batch.positions if self.padding is None else _counted_positions(batch, self.padding)
        return positions * self.types if types is None else positions * self.types + types


def _counted_positions(batch: TokenBatch, padding: int) -> torch.Tensor:
    """Return positions as RoBERTa and MPNet count them, int64 [tokens].

    padding: the id of the padding token. Positions count from padding + 1 and skip padding tokens. A text may
    contain the padding token by name; such a token has position `padding`.
    """
    counts = (batch.ids != padding).long()
    total = counts.cumsum(0)
    first = torch.arange(len(counts), device=counts.device) - batch.positions  # of each token's sequence
    return (total - (total - counts)[first]) * counts + padding
