"""Propose the reuse masks that calibration tries, from the rank of the heads.

rank: int [layers, heads], the position at which each head joins the mask; see damage.reuse_rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attncache_core.reuse.mask import ReuseMask, mildest_mask, parse_heads

# Number of mask sizes to try first, spread evenly up to the largest size.
_MASK_SIZES = 12


def held_first(rank: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return the rank with the heads that records hold moved to the front. held: bool [layers, heads]."""
    order = np.lexsort((rank.ravel(), ~held.ravel()))
    return order.argsort().reshape(rank.shape)


def candidate_masks(
    rank: np.ndarray, heads: str | None = None, max_heads: int | None = None
) -> list[ReuseMask]:
    """Return up to 12 masks of growing size, made of the mildest heads.

    heads: the operator's mask, see mask.parse_heads; if given, the only candidate. max_heads: size of the
    largest mask; None: all heads.
    """
    if heads:
        return [parse_heads(heads, rank)]
    max_heads = rank.size if max_heads is None else max_heads
    sizes = {max(1, round(max_heads * part / _MASK_SIZES)) for part in range(1, _MASK_SIZES + 1)}
    return [mildest_mask(rank, size) for size in sorted(sizes)]


def masks_between(masks: Sequence[ReuseMask], chosen: ReuseMask, rank: np.ndarray) -> list[ReuseMask]:
    """Return up to four new masks, with sizes between the chosen mask's size and its neighbours' sizes."""
    sizes = [mask.total for mask in masks]
    position = sizes.index(chosen.total)
    around = {
        round(chosen.total + (sizes[neighbour] - chosen.total) * part / 3)
        for neighbour in (position - 1, position + 1)
        if 0 <= neighbour < len(sizes)
        for part in (1, 2)
    }
    return [mildest_mask(rank, size) for size in sorted(around - set(sizes))]
