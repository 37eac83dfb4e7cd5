"""Attention of packed sequences: by the compiled kernel, else by torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch.nn import functional

from attncache_core import native

# Maps that are made to be kept. oneDNN builds a kernel for every new shape of a 16-bit product (0.5 to
# 0.9 ms) and torch's 16-bit softmax is slow on short rows: short sequences are multiplied in float32.
_FLOAT32_BELOW = 80
# Numbers of maps made at a time where attention goes by way of them: 256 MB in float32.
_MOST_CELLS = 2**26

# Q, K [n, L, h, d] of n sequences of one length -> maps [n, h, L, L].
MapsOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pattern:
    """What scores are multiplied by, and which tokens a token attends to.

    Token p sees the tokens from p - `before` to p + `after`; None is without a bound. A causal model has
    `after` = 0, a sliding window of w tokens `before` = w - 1.
    """

    scale: float
    before: int | None = None
    after: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether no token attends to a later one: maps are lower triangles."""
        return self.after == 0

    def hidden(self, length: int, device: torch.device | None = None) -> torch.Tensor | None:
        """Whether token p does not see token q: bool [L, L]; None where every token sees all."""
        before, after = (length if bound is None else bound for bound in (self.before, self.after))
        if min(before, after) >= length - 1:
            return None
        ones = torch.ones(length, length, dtype=torch.bool, device=device)
        return ones.triu(after + 1) | ones.tril(-before - 1)


def product_dtype(length: int, dtype: torch.dtype) -> torch.dtype:
    """What maps of `length` tokens are made in, in a model of `dtype`."""
    return torch.float32 if length < _FLOAT32_BELOW else dtype


def attention_scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """scale Q Kᵀ for Q, K [n, L, h, d]: [n, h, L, L] in the product dtype."""
    dtype = product_dtype(query.shape[1], query.dtype)
    return query.to(dtype).transpose(1, 2) @ key.to(dtype).permute(0, 2, 3, 1) * scale


def maps_from_scores(scores: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """The softmax of scores [n, h, L, L] over the tokens that each token sees. Overwrites the scores."""
    hidden = pattern.hidden(scores.shape[-1], scores.device)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    return scores.softmax(dim=-1)


def attention_maps(query: torch.Tensor, key: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """The maps of Q, K [n, L, h, d]: [n, h, L, L] in the product dtype."""
    return maps_from_scores(attention_scores(query, key, pattern.scale), pattern)


def apply_maps(maps: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """maps [n, h, L, L] @ V [n, L, h, d] -> context [n, L, h, d], in the maps' dtype."""
    return (maps @ value.to(maps.dtype).transpose(1, 2)).transpose(1, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: np.ndarray,
    pattern: Pattern,
    context: torch.Tensor,
) -> None:
    """Write maps @ V of each sequence to `context`; Q, K [tokens, h, d], V and context [tokens, h, d_v].

    offsets: int64 [sequences + 1], the first token of each sequence.
    """
    kernel = native.kernel()
    if kernel and kernel.takes(value):
        kernel.attend(
            query,
            key,
            value,
            offsets,
            pattern.scale,
            context,
            before=pattern.before,
            after=pattern.after,
        )
        return
    # A sum is finite only if all its terms are.
    if value.device.type == "cpu" and not all(x.sum(dim=0).isfinite().all() for x in (query, key)):
        # The operator below makes zeros of rows whose scores are NaN.
        attend_by_maps(partial(attention_maps, pattern=pattern), query, key, value, offsets, context)
        return
    for tokens, shape in _equal_lengths(offsets):
        q, k, v = (x[tokens].unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
        hidden = pattern.hidden(shape[1], value.device)
        seen = None if hidden is None else ~hidden
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=pattern.scale)
        context[tokens] = found.transpose(1, 2).flatten(0, 1)


def attend_by_maps(
    maps_of: MapsOf,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: np.ndarray,
    context: torch.Tensor,
) -> None:
    """As `attend`, where scores hold more than scale Q Kᵀ: by way of the maps that `maps_of` makes."""
    for tokens, (_, length) in _equal_lengths(offsets):
        step = max(1, _MOST_CELLS // (length * length * value.shape[1]))
        for first in range(tokens.start, tokens.stop, step * length):
            part = slice(first, min(first + step * length, tokens.stop))
            q, k, v = (x[part].unflatten(0, (-1, length)) for x in (query, key, value))
            context[part] = apply_maps(maps_of(q, k), v).flatten(0, 1).to(context.dtype)


def _equal_lengths(offsets: np.ndarray) -> list[tuple[slice, tuple[int, int]]]:
    """Neighbours of one length: their tokens, and (sequences, length)."""
    runs, first = [], int(offsets[0])
    for length, run in groupby(np.diff(offsets).tolist()):
        count = len(list(run))
        runs.append((slice(first, first + count * length), (count, length)))
        first += count * length
    return runs
