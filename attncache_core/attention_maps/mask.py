"""Which heads a hit takes from its record: the reuse mask, mildest heads first (damage.reuse_rank)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attncache_core.errors import InvalidInput


@dataclass(frozen=True)
class ReuseMask:
    """A set of (layer, head): in each layer the first `reused[layer]` heads of `order[layer]`."""

    order: tuple[tuple[int, ...], ...]  # layer -> its heads, the mildest to reuse first
    reused: tuple[int, ...]  # layer -> how many of them are reused

    @property
    def total(self) -> int:
        """Reused heads of all layers."""
        return sum(self.reused)

    @property
    def heads(self) -> int:
        """Heads of all layers."""
        return sum(map(len, self.order))

    def as_array(self) -> np.ndarray:
        """bool [layers, heads], heads as the checkpoint numbers them."""
        mask = np.zeros((len(self.order), len(self.order[0])), dtype=bool)
        for layer, (order, reused) in enumerate(zip(self.order, self.reused, strict=True)):
            mask[layer, list(order[:reused])] = True
        return mask


def head_order(rank: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """For each layer its heads, the first to be reused first, from their rank [layers, heads]."""
    return tuple(tuple(np.argsort(row, kind="stable").tolist()) for row in rank)


def mildest_mask(rank: np.ndarray, count: int) -> ReuseMask:
    """The mask of the `count` heads, of all layers, of the lowest rank [layers, heads]."""
    chosen = np.zeros(rank.size, dtype=bool)
    chosen[np.argsort(rank, axis=None, kind="stable")[:count]] = True
    return ReuseMask(head_order(rank), tuple(chosen.reshape(rank.shape).sum(axis=1).tolist()))


def parse_heads(text: str, rank: np.ndarray) -> ReuseMask:
    """The mask that an operator wrote: `all`, `layers:0-3` (or `layers:0,2,4-5`), or a number of heads.

    A number means the heads of the lowest `rank` [layers, heads]. Raises InvalidInput for anything else.
    """
    layers, heads = rank.shape
    if text == "all":
        return ReuseMask(head_order(rank), (heads,) * layers)
    if text.startswith("layers:"):
        chosen = parse_layers(text.removeprefix("layers:"), layers, field="heads")
        return ReuseMask(head_order(rank), tuple(heads if layer in chosen else 0 for layer in range(layers)))
    if is_count(text) and 0 < _number(text) <= rank.size:
        return mildest_mask(rank, _number(text))
    raise InvalidInput(f"heads must be 'all', 'layers:0-3' or a number from 1 to {rank.size}", field="heads")


def is_count(text: str) -> bool:
    """Whether the text is a whole number in plain digits."""
    return text.isascii() and text.isdigit()


def parse_layers(text: str, layers: int, *, field: str) -> frozenset[int]:
    """The numbers in `0-3` or `0,2,4-5`, each below `layers`. Raises InvalidInput of that field."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (is_count(first) and is_count(last)):
            raise InvalidInput(f"{field}: layers are written like 0-3 or 0,2,4-5", field=field)
        if _number(last) >= layers:
            raise InvalidInput(f"{field}: the model has layers 0 to {layers - 1}", field=field)
        chosen.update(range(_number(first), _number(last) + 1))
    if not chosen:
        raise InvalidInput(f"{field}: a range of layers counts upwards, like 0-3", field=field)
    return frozenset(chosen)


def _number(digits: str) -> int:
    """The number of these digits; of more than nine some number of nine, which is too large as well."""
    # Python reads no number of thousands of digits.
    return int(digits.lstrip("0")[:9] or "0")


def natural_rank(layers: int, heads: int) -> np.ndarray:
    """A stand-in for a rank that was not measured: heads in their own order, layers in theirs."""
    return np.arange(layers * heads).reshape(layers, heads)


def within_stored(mask: ReuseMask, stored: Sequence[int]) -> ReuseMask:
    """`mask`, if records of the first `stored[layer]` heads can serve it; raises InvalidInput if not."""
    if any(reused > held for reused, held in zip(mask.reused, stored, strict=True)):
        raise InvalidInput(
            f"the records hold {list(stored)} heads per layer, fewer than the mask's {list(mask.reused)}; "
            "build the database again with these heads",
            field="heads",
        )
    return mask
