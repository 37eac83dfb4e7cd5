"""Attention scores with more terms than scale Q Kᵀ, as data that both executors read.

    scores[p, q] = scale (Q[p] · K[q] + Q[p] · A[q - p] + K[q] · B[p - q]) + bias[q - p]

A and B are vectors of distances between tokens. A layer has some of the terms, or its scores are capped:
c tanh(score / c).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attncache_core.models.attention import attention_scores
from attncache_core.native.stack_layers import DistanceTerm


@dataclass(frozen=True, eq=False)
class ScoreTerms:
    """The terms of one layer. All tables have the heads in the layer's order."""

    query_term: DistanceTerm | None = None  # A
    key_term: DistanceTerm | None = None  # B
    # [heads, 2 positions - 1], for the distances from 1 - positions to positions - 1
    bias: torch.Tensor | None = None
    cap: float | None = None  # c; the compiled stack has no caps

    def scores(self, query: torch.Tensor, key: torch.Tensor, scale: float, heads: slice) -> torch.Tensor:
        """Return the scores [n, h, L, L] of Q and K [n, L, h, d], in attention.product_dtype.

        heads: the slice of the layer's heads that Q and K belong to, in the layer's order. The caller may
        overwrite the scores.
        """
        scores, length = attention_scores(query, key, scale), query.shape[1]
        if self.query_term is not None:
            scores += _by_distance(query, _vectors(self.query_term, heads, length) * scale, scores.dtype)
        if self.key_term is not None:
            vectors = _vectors(self.key_term, heads, length) * scale
            scores += _by_distance(key, vectors, scores.dtype).transpose(2, 3)
        if self.bias is not None:
            near = self.bias[heads, _near(self.bias.shape[1], length)]  # [h, 2 L - 1]
            # Window i begins at distance i + 1 - L, so it belongs to token L - 1 - i; flip sorts them.
            scores += near.unfold(1, length, 1).flip(1).to(scores.dtype)  # [h, L, L]
        return scores if self.cap is None else (scores / self.cap).tanh() * self.cap


def _near(distances: int, length: int) -> slice:
    """Return where the distances from 1 - length to length - 1 are among more distances around 0.

    Raises IndexError if there are fewer distances.
    """
    zero = distances // 2
    if length > zero + 1:
        raise IndexError("a sequence has more tokens than the model has positions")
    return slice(zero - length + 1, zero + length)


def _vectors(term: DistanceTerm, heads: slice, length: int) -> torch.Tensor:
    """Return the vectors of the distances from 1 - length to length - 1: [h, 2 length - 1, d]."""
    return term.table[heads, term.rows[_near(len(term.rows), length)]]


def _by_distance(x: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x[p] · table[q - p + L - 1] for all tokens p and q: [n, h, L, L] in `dtype`, not contiguous.

    x: [n, L, h, d]; table: [h, 2 L - 1, d], for the distances from 1 - L to L - 1.
    """
    count, length, heads, _ = x.shape
    distances = 2 * length - 1
    by_head = x.to(dtype).permute(2, 0, 1, 3).flatten(1, 2)  # [h, n L, d]
    products = by_head @ table.to(dtype).transpose(1, 2)  # [h, n L, distances]
    # Row p begins at distance index L - 1 - p, so the stride between rows is one less than a row's length.
    strides = (length * distances, count * length * distances, distances - 1, 1)
    return products.as_strided((count, heads, length, length), strides, length - 1)
