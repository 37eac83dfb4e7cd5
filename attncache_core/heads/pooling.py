"""Pooling: reduce the token vectors of each sequence to one vector, as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.text.token_batch import TokenBatch, by_sequence


def pool(hidden: torch.Tensor, batch: TokenBatch, pooling: Pooling, prompt_tokens: int = 0) -> torch.Tensor:
    """Pool [tokens, hidden] to one float32 vector per sequence, [sequences, modes * hidden], in packed order.

    If `pooling.include_prompt` is off, the first `prompt_tokens` tokens of each sequence are skipped. A batch
    with different prompts has its own counts, `batch.prompt_tokens`, which take precedence. The mode
    "lasttoken" never skips, and "weightedmean" keeps the weights of the original positions. Raises ValueError
    if a mode is unknown.
    """
    if pooling.modes == ("lasttoken",):
        return hidden[torch.from_numpy(batch.last_rows)].float()
    batch, hidden = batch.apart(hidden)
    if pooling.include_prompt and (batch.lengths == batch.lengths[0]).all():
        vectors = hidden.float().view(len(batch.lengths), -1, hidden.shape[1])
        return _pool_modes(vectors, pooling.modes, 0)
    skipped = np.full(len(batch.lengths), 0 if pooling.include_prompt else prompt_tokens)
    if batch.prompt_tokens is not None and not pooling.include_prompt:
        skipped = batch.prompt_tokens
    # At least one token remains: if a text adds no token to its prompt, its last token is pooled.
    skipped = np.minimum(skipped, batch.lengths - 1)
    parts = []
    for group in batch.groups():
        vectors = by_sequence(hidden, group).float()
        first = 0
        for count, run in groupby(skipped[group.sequences].tolist()):
            stop = first + len(list(run))
            parts.append(_pool_modes(vectors[first:stop], pooling.modes, count))
            first = stop
    return torch.cat(parts)


def _pool_modes(vectors: torch.Tensor, modes: Sequence[str], skipped: int) -> torch.Tensor:
    """Pool [n, L, hidden] to [n, modes * hidden], without the first `skipped` tokens."""
    pooled = [_pool(vectors, mode, skipped) for mode in modes]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


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
