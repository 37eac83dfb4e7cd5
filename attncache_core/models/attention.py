"""Attention of sequences side by side: bidirectional, of one length or filled up and masked."""

from __future__ import annotations

import torch
from torch.nn import functional

# Short sequences are multiplied in float32 whatever the model's dtype. oneDNN builds a kernel for every new
# shape of a 16-bit product (0.5 to 0.9 ms), and groups of real traffic are of ever new shapes; float32
# products need none and, up to here, are as fast as 16-bit ones whose kernel is there.
_FLOAT32_BELOW = 80
# In float32 SDPA is faster than explicit maps from about here on; in 16 bits explicit maps stay ahead.
_SDPA_FROM = 192


def product_dtype(length: int, dtype: torch.dtype) -> torch.dtype:
    """What maps and V of `length` tokens are multiplied in, in a model of `dtype`."""
    return torch.float32 if length < _FLOAT32_BELOW else dtype


def attention_maps(
    query: torch.Tensor, key: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(scale Q Kᵀ + mask) for Q, K [n, L, h, d]: maps [n, h, L, L] in the product dtype.

    mask: [n, 1, L], added to every row of scores; None for none.
    """
    n, length, heads, _ = query.shape
    dtype = product_dtype(length, query.dtype)
    added = torch.zeros((), dtype=dtype) if mask is None else mask.to(dtype).repeat_interleave(heads, dim=0)
    scores = torch.baddbmm(
        added, _by_head(query, dtype), _by_head(key, dtype).transpose(1, 2), alpha=scale
    )  # [n h, L, L]
    return scores.softmax(dim=-1).view(n, heads, length, length)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The context [n, h, L, d] from Q, K, V [n, L, h, d], by the kernel that is fastest at this length.

    mask: as attention_maps has it.
    """
    if mask is None and query.dtype is torch.float32 and query.shape[1] >= _SDPA_FROM:
        return functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scale
        )
    return apply_maps(attention_maps(query, key, scale, mask), value)


def apply_maps(maps: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """maps [n, h, L, L] @ V [n, L, h, d] -> context [n, h, L, d], in the product dtype.

    Raises TypeError for maps of another dtype than the product's: converting them is the caller's decision.
    """
    n, heads, length, _ = maps.shape
    dtype = product_dtype(length, value.dtype)
    if maps.dtype != dtype:
        raise TypeError(f"maps are {maps.dtype}, and are multiplied in {dtype} here: convert them")
    product = torch.bmm(maps.view(n * heads, length, length), _by_head(value, dtype))
    return product.view(n, heads, length, -1)


def _by_head(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, L, h, d] -> [n h, L, d], copied: a product of scattered heads would copy them anyway."""
    n, length, heads, width = x.shape
    by_head = torch.empty(n, heads, length, width, dtype=dtype)
    return by_head.copy_(x.transpose(1, 2)).view(n * heads, length, width)
