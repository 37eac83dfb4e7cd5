"""Pooling: reduce the token vectors of each sequence to one vector, as sentence-transformers does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from attncache_core.heads.embedding import EmbeddingHead
from attncache_core.native.pooling import pool_states
from attncache_core.text.token_batch import TokenBatch, by_sequence


@dataclass(frozen=True)
class Pooler:
    """Makes the vectors of sequences from the vectors of their tokens."""

    modes: tuple[str, ...]  # the vectors of all modes follow each other
    # Tokens at the front of a sequence that are left out; None: no token is. The mode "lasttoken" never
    # leaves a token out, and "weightedmean" keeps the weights of the original positions.
    prompt_tokens: int | None = None
    head: EmbeddingHead | None = None  # of the pooled vectors

    def __call__(self, hidden: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Return one vector per sequence, float32 [sequences, modes * hidden], in packed order.

        Raises ValueError if a mode is unknown.
        """
        batch, hidden = batch.apart(hidden)
        hidden, skipped = hidden.float(), self.skipped(batch.lengths, batch.prompt_tokens)
        compiled = pool_states(hidden, batch.offsets, self.modes, skipped)
        if compiled is not None:
            return torch.from_numpy(compiled)
        skipped = np.zeros(len(batch.lengths), np.int64) if skipped is None else skipped
        parts = []
        for group in batch.groups():
            vectors = by_sequence(hidden, group)
            first = 0
            for count, run in groupby(skipped[group.sequences].tolist()):
                stop = first + len(list(run))
                pooled = [_pool(vectors[first:stop], mode, count) for mode in self.modes]
                parts.append(torch.cat(pooled, dim=1))
                first = stop
        return torch.cat(parts)

    def skipped(self, lengths: np.ndarray, prompt_tokens: np.ndarray | None) -> np.ndarray | None:
        """Return the tokens at the front of each sequence that are left out, int64 [n]; None: no token is.

        lengths: of the sequences. prompt_tokens: of each sequence, if prompts differ. At least one token
        remains: if a text adds no token to its prompt, its last token is pooled.
        """
        if self.prompt_tokens is None:
            return None
        return np.minimum(self.prompt_tokens if prompt_tokens is None else prompt_tokens, lengths - 1)


def _pool(vectors: torch.Tensor, mode: str, skipped: int) -> torch.Tensor:
    """Pool [n, L, hidden] to [n, hidden] by one mode, without the first `skipped` tokens."""
    if mode == "lasttoken":
        return vectors[:, -1]
    kept = vectors[:, skipped:] if skipped else vectors
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
            positions = range(skipped + 1, vectors.shape[1] + 1)
            weights = torch.tensor(positions, dtype=torch.float32, device=vectors.device)
            return torch.einsum("nld,l->nd", kept, weights / weights.sum())
    raise ValueError(f"unknown pooling mode {mode}")
