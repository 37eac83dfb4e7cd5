"""From token vectors to what a caller asked for: pooling, unit length, class scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

import numpy as np
import torch

from attncache_core.checkpoint import Pooling
from attncache_core.errors import NotFinite
from attncache_core.tokens import TokenBatch, by_sequence


class Measure(StrEnum):
    """In what quality is counted; always a mean over hits."""

    COSINE = "cosine"  # of the output with reuse to the full model's
    AGREEMENT = "agreement"  # share of decisions that stay what they were


def pool(hidden: torch.Tensor, batch: TokenBatch, pooling: Pooling, prompt_tokens: int = 0) -> torch.Tensor:
    """One float32 vector a sequence, [sequences, modes * hidden], from [tokens, hidden], in packed order.

    As sentence-transformers pools: with `include_prompt` off, the first `prompt_tokens` of each sequence (or
    the batch's own, where its prompts differ) are left out (of all modes but the last token's; weighted means
    keep their positions' weights).
    """
    skipped = np.full(len(batch.lengths), 0 if pooling.include_prompt else prompt_tokens)
    if batch.prompt_tokens is not None and not pooling.include_prompt:
        skipped = batch.prompt_tokens
    # Where a text adds no token to its prompt's, the last one is all there is to pool.
    skipped = np.minimum(skipped, batch.lengths - 1)
    parts = []
    for group in batch.groups():
        vectors = by_sequence(hidden, group).float()
        first = 0
        for count, alike in groupby(skipped[group.sequences].tolist()):
            stop = first + len(list(alike))
            parts.append(
                torch.cat([_pool(vectors[first:stop], mode, count) for mode in pooling.modes], dim=1)
            )
            first = stop
    return torch.cat(parts)


def _pool(vectors: torch.Tensor, mode: str, skipped: int) -> torch.Tensor:
    """[n, L, hidden] -> [n, hidden]."""
    if mode == "lasttoken":
        return vectors[:, -1]
    kept = vectors[:, skipped:]
    match mode:
        case "cls":
            return kept[:, 0]
        case "max":
            return kept.amax(dim=1)
        case "mean":
            return kept.mean(dim=1)
        case "mean_sqrt_len_tokens":
            return kept.sum(dim=1) / kept.shape[1] ** 0.5
        case "weightedmean":
            places = range(skipped + 1, vectors.shape[1] + 1)
            weights = torch.tensor(places, dtype=torch.float32, device=vectors.device)
            return torch.einsum("nld,l->nd", kept, weights / weights.sum())
    raise ValueError(f"unknown pooling mode {mode}")


def finite_sequences(batch: TokenBatch, hidden: torch.Tensor, outputs: np.ndarray) -> np.ndarray:
    """Whether each sequence's tokens and its output are finite: bool [sequences], in packed order.

    hidden: the last layer's output [tokens, hidden]; outputs: float32 [sequences, d], in packed order. A
    token that is not finite in one layer stays so up to the last one, but need not show in the output:
    pooling may leave the token out.
    """
    own = hidden[: int(batch.offsets[-1])]
    tokens = np.isfinite(own.sum(dim=1).float().cpu().numpy())
    if not tokens.all():
        # A sum is finite only if all its terms are; one that is not may have overflowed.
        tokens = own.isfinite().all(dim=1).cpu().numpy()
    of_tokens: np.ndarray = np.logical_and.reduceat(tokens, batch.offsets[:-1])
    return of_tokens & np.isfinite(outputs).all(axis=1)


def require_finite(finite: np.ndarray, of: str = "inputs") -> None:
    """Raise NotFinite for the first text that is not finite.

    finite: bool [texts], or [texts, n] of all numbers that must be; of: the field that holds the texts.
    """
    if not finite.all():
        raise NotFinite.of(int(finite.reshape(len(finite), -1).all(axis=1).argmin()), of)


def normalize(embeddings: np.ndarray) -> np.ndarray:
    """Finite rows [n, d] brought to unit length; a row of zeros stays zero."""
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    if np.isinf(norms).any() and embeddings.dtype != np.float64:
        # Only their squares are too large.
        return normalize(embeddings.astype(np.float64)).astype(embeddings.dtype)
    return embeddings / np.maximum(norms, 1e-12)


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The cosine of each row of `left` with the same row of `right`: [n, d], [n, d] -> [n]."""
    return np.einsum("nd,nd->n", normalize(left), normalize(right))


@dataclass(frozen=True)
class Judge:
    """Compares outputs with reuse, as the engine gives them, with the full model's.

    class_logits: outputs [n, d] -> logits [n, classes]; None where outputs are compared as embeddings.
    multi_label: whether each class is decided on by itself, as class_scores and class_decisions say.
    """

    measure: Measure
    class_logits: Callable[[np.ndarray], np.ndarray] | None
    multi_label: bool = False

    def comparable(self, outputs: np.ndarray) -> np.ndarray:
        """Rows of unit length whose cosine tells likeness: embeddings, or the roots of class probabilities.

        (The cosine of two such roots is the Bhattacharyya coefficient of the probabilities, and its mean over
        the classes where each of them is decided on by itself.)
        """
        if self.class_logits is None:
            return normalize(outputs)
        scores = class_scores(self.class_logits(outputs), multi_label=self.multi_label)
        if self.multi_label:
            scores = np.concatenate([scores, 1 - scores], axis=1) / scores.shape[1]
        return np.sqrt(scores)

    def fidelity(self, with_reuse: np.ndarray, full: np.ndarray) -> np.ndarray:
        """The measure for each row, float64 [n]: the cosine, or 1 where all is decided alike, else 0.

        0 too where one of the two rows is not finite, or what is compared of it.
        """
        with np.errstate(invalid="ignore"):
            compared = [self._compared(outputs) for outputs in (with_reuse, full)]
            if self.measure is Measure.AGREEMENT:
                decided = [class_decisions(logits, self.multi_label) for logits in compared]
                alike = np.equal(*decided).all(axis=1)
            else:
                alike = cosines(*compared)
        finite = np.isfinite(np.concatenate([with_reuse, full, *compared], axis=1)).all(axis=1)
        return np.where(finite, alike, 0).astype(np.float64)

    def _compared(self, outputs: np.ndarray) -> np.ndarray:
        """Of each row its logits [n, classes], or for cosine what `comparable` says."""
        if self.measure is Measure.COSINE:
            return self.comparable(outputs)
        assert self.class_logits is not None
        return self.class_logits(outputs)


def class_scores(logits: np.ndarray, temperature: float = 1.0, multi_label: bool = False) -> np.ndarray:
    """Probabilities of logits [n, classes], float32.

    softmax(logits / temperature), which sums to 1; with `multi_label` the sigmoid, of each class by itself.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if multi_label:
        return np.exp(-np.logaddexp(0, -logits / temperature)).astype(np.float32)
    powers = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


def class_decisions(logits: np.ndarray, multi_label: bool = False) -> np.ndarray:
    """What logits [n, classes] decide: the class [n, 1], or with `multi_label` whether each [n, classes]."""
    return logits > 0 if multi_label else logits.argmax(axis=1)[:, None]
