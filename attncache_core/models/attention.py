"""Attention of packed sequences, by the compiled kernel if it supports the tensors, else by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from attncache_core import native
from attncache_core.text.prefix_tree import PrefixTree

# Maps of sequences shorter than this are made in float32. oneDNN compiles a kernel for every new shape of a
# 16-bit product (0.5 to 0.9 ms), and torch's 16-bit softmax is slow on short rows.
_FLOAT32_BELOW = 80
# `attend_by_maps` holds at most this many map elements at a time: 256 MB in float32.
_MAX_MAP_ELEMENTS = 2**26
# Widest head of torch's attention of packed sequences.
_MAX_PACKED_HEAD = 256

# Q, K [n, L, h, d] of n sequences of one length -> maps [n, h, L, L].
MapsOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Q [n, P, h, d] and K [n, L, h, d] -> scores [n, h, P, L].
ScoresOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The scale of the scores, and the range of tokens that each token attends to.

    Token p attends to the tokens from p - `before` to p + `after`; None means no bound on that side. A causal
    model has `after` = 0. A sliding window of w tokens has `before` = w - 1.
    """

    scale: float
    before: int | None = None
    after: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether no token attends to a later token, so that maps are lower triangles."""
        return self.after == 0

    def masked(self, length: int, device: torch.device | None = None) -> torch.Tensor | None:
        """Return which tokens q each token p does not attend to: bool [L, L], p by q.

        Returns None if every token of a sequence of `length` tokens attends to all tokens.
        """
        before, after = (length if bound is None else bound for bound in (self.before, self.after))
        if min(before, after) >= length - 1:
            return None
        ones = torch.ones(length, length, dtype=torch.bool, device=device)
        return ones.triu(after + 1) | ones.tril(-before - 1)


def product_dtype(length: int, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a model of `dtype` makes maps of `length` tokens."""
    return torch.float32 if length < _FLOAT32_BELOW else dtype


def attention_scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale Q Kᵀ, [n, h, P, L] in the product dtype, for Q [n, P, h, d] and K [n, L, h, d]."""
    dtype = product_dtype(query.shape[1], query.dtype)
    return query.to(dtype).transpose(1, 2) @ key.to(dtype).permute(0, 2, 3, 1) * scale


def maps_from_scores(scores: torch.Tensor, attention_mask: AttentionMask) -> torch.Tensor:
    """Return the softmax of masked scores [n, h, L, L] over the last axis. Overwrites the scores."""
    masked = attention_mask.masked(scores.shape[-1], scores.device)
    if masked is not None:
        scores.masked_fill_(masked, -torch.inf)
    return scores.softmax(dim=-1)


def attention_maps(query: torch.Tensor, key: torch.Tensor, attention_mask: AttentionMask) -> torch.Tensor:
    """Return the maps of Q, K [n, L, h, d]: [n, h, L, L] in the product dtype."""
    return maps_from_scores(attention_scores(query, key, attention_mask.scale), attention_mask)


def apply_maps(maps: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return maps [n, h, P, L] @ V [n, L, h, d]: the context [n, P, h, d], in the maps' dtype."""
    return (maps @ value.to(maps.dtype).transpose(1, 2)).transpose(1, 2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: np.ndarray,
    attention_mask: AttentionMask,
    context: torch.Tensor,
) -> None:
    """Write maps @ V of each sequence to `context`; Q, K [tokens, h, d], V and context [tokens, h, d_v].

    offsets: int64 [sequences + 1], the first token of each sequence.
    """
    kernel = native.kernel()
    if kernel and kernel.supports(value):
        kernel.attend(
            query,
            key,
            value,
            offsets,
            attention_mask.scale,
            context,
            before=attention_mask.before,
            after=attention_mask.after,
        )
        return
    if _runs_packed(query, value):
        _attend_packed(query, key, value, offsets, attention_mask, context)
        return
    # torch's fused operator turns rows of NaN scores, and rows whose scores are all -infinity, into zeros, so
    # such inputs go by way of the maps.
    if value.device.type == "cpu" and not _has_finite_scores(query, key):
        maps_of = partial(attention_maps, attention_mask=attention_mask)
        attend_by_maps(maps_of, query, key, value, offsets, context)
        return
    for tokens, shape in _equal_lengths(offsets):
        q, k, v = (x[tokens].unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
        masked = attention_mask.masked(shape[1], value.device)
        kept = None if masked is None else ~masked
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=kept, scale=attention_mask.scale)
        context[tokens] = found.transpose(1, 2).flatten(0, 1)


def _has_finite_scores(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether all products of Q and K are finite. May be False for very large numbers, too.

    A sum is finite only if all its terms are, and |q . k| is at most half the sum of the squares of q and k.
    """
    return all(bool(x.square().sum().isfinite()) for x in (query, key))


def _runs_packed(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether torch computes packed sequences of these tensors as they are (FlashAttention)."""
    width = value.shape[-1]
    return (
        value.device.type == "cuda"
        and value.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == width
        and width <= _MAX_PACKED_HEAD
        and width % 8 == 0
        and _packed_attention() is not None
    )


@cache
def _packed_attention() -> Callable[..., Any] | None:
    """Return torch's attention of packed sequences; None before torch 2.11, which has no windows for it."""
    from torch.nn.attention.varlen import varlen_attn  # takes a second to import

    return varlen_attn if "window_size" in signature(varlen_attn).parameters else None


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: np.ndarray,
    attention_mask: AttentionMask,
    context: torch.Tensor,
) -> None:
    """Compute `attend` by FlashAttention (Dao 2023), one kernel for sequences of any lengths."""
    rows = slice(int(offsets[0]), int(offsets[-1]))  # the operator writes all rows that it is given
    # From pinned memory, so that the processor does not wait for the layers that the GPU still computes.
    pinned = torch.from_numpy((offsets - offsets[0]).astype(np.int32)).pin_memory()
    ends, longest = pinned.to(value.device, non_blocking=True), int(np.diff(offsets).max())
    before, after = (
        -1 if bound is None else bound for bound in (attention_mask.before, attention_mask.after)
    )
    attend_packed = _packed_attention()
    assert attend_packed is not None
    context[rows] = attend_packed(
        query[rows],
        key[rows],
        value[rows],
        ends,
        ends,
        longest,
        longest,
        scale=attention_mask.scale,
        window_size=(before, after),
    )


def attend_by_maps(
    maps_of: MapsOf,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: np.ndarray,
    context: torch.Tensor,
) -> None:
    """Write maps @ V of each sequence to `context`, with the maps that `maps_of` makes from Q and K.

    For scores with more terms than scale Q Kᵀ. Arguments as for `attend`.
    """
    for tokens, (_, length) in _equal_lengths(offsets):
        step = max(1, _MAX_MAP_ELEMENTS // (length * length * value.shape[1]))  # sequences
        for first in range(tokens.start, tokens.stop, step * length):
            part = slice(first, min(first + step * length, tokens.stop))
            q, k, v = (x[part].unflatten(0, (-1, length)) for x in (query, key, value))
            context[part] = apply_maps(maps_of(q, k), v).flatten(0, 1).to(context.dtype)


def attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: PrefixTree,
    attention_mask: AttentionMask,
    context: torch.Tensor,
    scores_of: ScoresOf | None = None,
) -> None:
    """Write maps @ V of all rows in the blocks of a tree to `context`; other arguments as for `attend`.

    attention_mask: causal. scores_of: makes the scores from Q and K; None for scale Q Kᵀ.
    """
    before, device = attention_mask.before, value.device
    # Weight 0 times NaN or infinity is NaN, which must not reach the rows of other sequences.
    finite = _has_finite_scores(query, key) and bool(value.sum().isfinite())
    for block in tree.blocks(before, device) if finite else tree.single_rows(before, device):
        q, k, v = query[None, block.rows], key[None, block.rows], value[None, block.rows]
        if len(block.before):
            k, v = (
                torch.cat([x[None, block.before], computed], dim=1) for x, computed in ((key, k), (value, v))
            )
        if finite and scores_of is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            found = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=block.visible, scale=attention_mask.scale
            ).transpose(1, 2)
        else:
            make = scores_of or partial(attention_scores, scale=attention_mask.scale)
            scores = make(q, k).masked_fill(~block.visible, -torch.inf)
            found = apply_maps(scores.softmax(dim=-1), v)
        context[block.rows] = found[0].to(context.dtype)


def _equal_lengths(offsets: np.ndarray) -> list[tuple[slice, tuple[int, int]]]:
    """Return the runs of adjacent sequences of equal length: (tokens of the run, (sequences, length))."""
    runs, first = [], int(offsets[0])
    for length, run in groupby(np.diff(offsets).tolist()):
        count = len(list(run))
        runs.append((slice(first, first + count * length), (count, length)))
        first += count * length
    return runs
