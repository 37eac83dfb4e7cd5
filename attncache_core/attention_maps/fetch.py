"""From records to context: maps @ V for hits, straight from the mapped file.

Two ways, the same values. Records lie scattered in their file, so either their maps are gathered into one
batch tensor (one copy, one product) or each record's view is multiplied by itself (no copy, n products).
"""

from __future__ import annotations

import torch

from attncache_core.attention_maps.store import Segment
from attncache_core.models.attention import apply_maps, product_dtype

# Measured with 12 heads of 32 on 2 cores: a product costs about 15 µs to start, so at 16 and 32 tokens
# gathering is 3 to 7 times faster; at 128 tokens the views are, by a third.
VIEWS_FROM_LENGTH = 96


def reused_context(
    segment: Segment, records: torch.Tensor, layer: int, heads: int, value: torch.Tensor
) -> torch.Tensor:
    """maps @ V of the first `heads` heads of a layer: V [n, L, heads, d] -> context [n, heads, L, d].

    records: int64 [n], the record of each sequence. Maps are converted to the product's dtype if they differ.
    """
    dtype = product_dtype(segment.length, value.dtype)
    if segment.length < VIEWS_FROM_LENGTH:
        return apply_maps(segment.gather_layer_maps(records, layer, heads).to(dtype), value)
    products = [
        apply_maps(segment.layer_maps(record, layer, heads)[None].to(dtype), value[row : row + 1])
        for row, record in enumerate(records.tolist())
    ]
    return torch.cat(products)
