"""Operations on output vectors: checks for finite values, scaling to unit length, cosine similarity."""

from __future__ import annotations

import math

import numpy as np
import torch

from attncache_core.errors import NotFinite
from attncache_core.native.pooling import unit_length
from attncache_core.text.token_batch import TokenBatch


def finite_sequences(batch: TokenBatch, hidden: torch.Tensor, outputs: np.ndarray) -> np.ndarray:
    """Return whether each sequence's tokens and output are finite: bool [sequences], in packed order.

    hidden: the last layer's output [tokens, hidden]. outputs: float32 [sequences, d], in packed order. A
    token that is not finite in one layer is not finite in the last layer either. The output may still be
    finite, because pooling may skip the token.
    """
    # A sum is finite only if all its terms are. A sum of finite terms may overflow, so a sum that is not
    # finite proves nothing.
    if math.isfinite(hidden.sum()) and math.isfinite(outputs.sum()):
        return np.ones(len(batch.order), dtype=bool)
    tokens = hidden.isfinite().all(dim=1).cpu().numpy()
    runs: np.ndarray = np.logical_and.reduceat(tokens, batch.offsets[:-1])
    of_tokens = runs if batch.tree is None else batch.tree.of_sequences(runs)
    return of_tokens & np.isfinite(outputs).all(axis=1)


def require_finite(finite: np.ndarray, of: str = "inputs") -> None:
    """Raise NotFinite, with the index of the first text that is not finite, unless all texts are finite.

    finite: bool [texts], or bool [texts, n] for n numbers per text. of: the field that holds the texts.
    """
    if not finite.all():
        raise NotFinite.of(int(finite.reshape(len(finite), -1).all(axis=1).argmin()), of)


def normalize(embeddings: np.ndarray) -> np.ndarray:
    """Scale finite rows [n, d] to unit length; a row of zeros stays zero.

    Raises ValueError if there are no rows: for one embedding, give `embedding[None]`.
    """
    embeddings = np.asarray(embeddings)
    if embeddings.ndim != 2:
        raise ValueError(
            f"embeddings must be rows [n, d], and have the shape {embeddings.shape}; for one embedding, give "
            "embedding[None]"
        )
    compiled = unit_length(embeddings) if embeddings.dtype == np.float32 else None
    if compiled is not None:
        return compiled
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    if np.isinf(norms).any() and embeddings.dtype != np.float64:
        # The rows are finite, and only their squares overflow.
        return normalize(embeddings.astype(np.float64)).astype(embeddings.dtype)
    return embeddings / np.maximum(norms, 1e-12)


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of `left` with the same row of `right`: [n, d], [n, d] -> [n]."""
    return np.einsum("nd,nd->n", normalize(left), normalize(right))


def cosine_matrix(vectors: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the cosines of vectors [n, d] and others [m, d], all of unit length: float32 [n, m], in [-1, 1].

    The sums are in float64, because in float32 a matrix product rounds them by the place of a row, and equal
    vectors would have different cosines.
    """
    products = vectors.astype(np.float64) @ others.T.astype(np.float64)
    found: np.ndarray = np.clip(products, -1, 1).astype(np.float32)
    return found
