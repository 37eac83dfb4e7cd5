"""Bidirectional attention of packed sequences: by the compiled kernel, else by torch's operators."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import torch
from torch.nn import functional

from attncache_core import native

# Maps that are made to be kept. oneDNN builds a kernel for every new shape of a 16-bit product (0.5 to
# 0.9 ms) and torch's 16-bit softmax is slow on short rows: short sequences are multiplied in float32.
_FLOAT32_BELOW = 80


def product_dtype(length: int, dtype: torch.dtype) -> torch.dtype:
    """What maps of `length` tokens are made in, in a model of `dtype`."""
    return torch.float32 if length < _FLOAT32_BELOW else dtype


def attention_maps(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale Q Kᵀ) for Q, K [n, L, h, d]: maps [n, h, L, L] in the product dtype."""
    dtype = product_dtype(query.shape[1], query.dtype)
    scores = query.to(dtype).transpose(1, 2) @ key.to(dtype).permute(0, 2, 3, 1)
    return (scores * scale).softmax(dim=-1)


def apply_maps(maps: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """maps [n, h, L, L] @ V [n, L, h, d] -> context [n, L, h, d], in the maps' dtype."""
    return (maps @ value.to(maps.dtype).transpose(1, 2)).transpose(1, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: np.ndarray,
    scale: float,
    context: torch.Tensor,
) -> None:
    """Write softmax(scale Q Kᵀ) V of each sequence to `context`; all tensors [tokens, h, d].

    offsets: int64 [sequences + 1], the first token of each sequence.
    """
    kernel = native.kernel()
    if kernel and kernel.takes(value):
        kernel.attend(query, key, value, offsets, scale, context)
        return
    for tokens, shape in _equal_lengths(offsets):
        q, k, v = (x[tokens].unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
        found = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        context[tokens] = found.transpose(1, 2).flatten(0, 1)


def _equal_lengths(offsets: np.ndarray) -> list[tuple[slice, tuple[int, int]]]:
    """Neighbours of one length: their tokens, and (sequences, length)."""
    runs, first = [], int(offsets[0])
    for length, run in groupby(np.diff(offsets).tolist()):
        count = len(list(run))
        runs.append((slice(first, first + count * length), (count, length)))
        first += count * length
    return runs
