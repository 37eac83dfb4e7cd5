"""The reuse mask: the heads whose attention maps a hit takes from a record.

Heads join the mask by rank: the heads whose reuse does the least damage come first (calibration/damage.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attncache_core.errors import InvalidInput
from attncache_core.models.variant import is_count, parse_layers, to_number


@dataclass(frozen=True)
class ReuseMask:
    """A set of heads: in each layer, the first `reused[layer]` heads of `order[layer]`."""

    order: tuple[tuple[int, ...], ...]  # layer -> all heads of the layer, least damage first
    reused: tuple[int, ...]  # layer -> number of reused heads

    @property
    def total(self) -> int:
        """The number of reused heads of all layers."""
        return sum(self.reused)

    @property
    def heads(self) -> int:
        """The number of heads of all layers, reused or not."""
        return sum(map(len, self.order))

    def as_array(self) -> np.ndarray:
        """Return which heads are reused, bool [layers, heads], with the checkpoint's head numbers."""
        mask = np.zeros((len(self.order), len(self.order[0])), dtype=bool)
        for layer, (order, reused) in enumerate(zip(self.order, self.reused, strict=True)):
            mask[layer, list(order[:reused])] = True
        return mask


def head_order(rank: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return the heads of each layer in ascending order of their rank [layers, heads]."""
    return tuple(tuple(np.argsort(row, kind="stable").tolist()) for row in rank)


def mildest_mask(rank: np.ndarray, count: int) -> ReuseMask:
    """Return the mask of the `count` heads with the lowest rank [layers, heads] over all layers."""
    chosen = np.zeros(rank.size, dtype=bool)
    chosen[np.argsort(rank, axis=None, kind="stable")[:count]] = True
    return ReuseMask(head_order(rank), tuple(chosen.reshape(rank.shape).sum(axis=1).tolist()))


def parse_heads(text: str, rank: np.ndarray) -> ReuseMask:
    """Return the mask for an operator's option: `all`, `layers:0-3`, `layers:0,2,4-5`, or a number of heads.

    A number selects the heads with the lowest `rank` [layers, heads]. Raises InvalidInput for other text.
    """
    layers, heads = rank.shape
    if text == "all":
        return ReuseMask(head_order(rank), (heads,) * layers)
    if text.startswith("layers:"):
        chosen = parse_layers(text.removeprefix("layers:"), layers, field="heads")
        return ReuseMask(head_order(rank), tuple(heads if layer in chosen else 0 for layer in range(layers)))
    if is_count(text) and 0 < to_number(text) <= rank.size:
        return mildest_mask(rank, to_number(text))
    raise InvalidInput(f"heads must be 'all', 'layers:0-3' or a number from 1 to {rank.size}", field="heads")


def natural_rank(layers: int, heads: int) -> np.ndarray:
    """Return a rank [layers, heads] in the order of layers and heads, if no rank was measured."""
    return np.arange(layers * heads).reshape(layers, heads)


def require_stored_heads(mask: ReuseMask, stored: Sequence[int]) -> ReuseMask:
    """Return `mask`. Raises InvalidInput if records do not hold all heads of the mask.

    stored: number of heads of each layer that a record holds.
    """
    if any(reused > held for reused, held in zip(mask.reused, stored, strict=True)):
        raise InvalidInput(
            f"the records hold {list(stored)} heads per layer, fewer than the mask's {list(mask.reused)}; "
            "build the database again with these heads",
            field="heads",
        )
    return mask
