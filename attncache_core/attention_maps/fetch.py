"""From records to context: maps @ V for hits, straight from the mapped file.

Records lie scattered in their file. Either their maps are gathered into one batch tensor (one copy, one
product), or each record's view is multiplied by itself (no copy, a product each): the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from attncache_core.attention_maps.store import Segment
from attncache_core.models.attention import apply_maps, product_dtype

# Measured with 12 heads of 32 on 2 cores: a product costs about 15 µs to start, so at 16 and 32 tokens
# gathering is 3 to 7 times faster; at 128 tokens the views are, by a third.
VIEWS_FROM_LENGTH = 96


class RecordGroup(NamedTuple):
    """The records that serve neighbouring sequences of one length."""

    segment: Segment
    records: torch.Tensor  # int64 [sequences]


def reused_context(
    groups: Sequence[RecordGroup], layer: int, heads: int, value: torch.Tensor
) -> torch.Tensor:
    """maps @ V of the first `heads` heads of a layer: V [n, L, heads, d] -> context [n, heads, L, d].

    The groups' records serve the n sequences in turn. A sequence shorter than L has zeros where its maps
    end. Maps are converted to the product's dtype if they differ.
    """
    length = value.shape[1]
    if len(groups) == 1 and groups[0].segment.length == length:
        return _context_of_one_length(groups[0], layer, heads, value)
    maps = torch.zeros(len(value), heads, length, length, dtype=product_dtype(length, value.dtype))
    first = 0
    for segment, records in groups:
        own = maps[first : first + len(records), :, : segment.length, : segment.length]
        own.copy_(segment.gather_layer_maps(records, layer, heads))
        first += len(records)
    return apply_maps(maps, value)


def _context_of_one_length(group: RecordGroup, layer: int, heads: int, value: torch.Tensor) -> torch.Tensor:
    segment, records = group
    dtype = product_dtype(segment.length, value.dtype)
    if segment.length < VIEWS_FROM_LENGTH:
        return apply_maps(segment.gather_layer_maps(records, layer, heads).to(dtype), value)
    products = [
        apply_maps(segment.layer_maps(record, layer, heads)[None].to(dtype), value[row : row + 1])
        for row, record in enumerate(records.tolist())
    ]
    return torch.cat(products)
