"""Algorithm 2: the layers of a model over a packed batch in which some sequences reuse maps and others don't.

Hits stand before misses, each by length. So what only misses need is computed on one slice of the tokens,
and sequences of similar length and one kind are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.attention_maps.fetch import RecordGroup, reused_context
from attncache_core.attention_maps.search import ReusePlan
from attncache_core.attention_maps.store import Segment
from attncache_core.models import AttentionLayer, PackedModel
from attncache_core.tokens import Bucket, TokenBatch


class ReusedBucket(NamedTuple):
    """Hits of similar length and the records that serve them."""

    bucket: Bucket
    groups: list[RecordGroup]


def hits_first(
    batch: TokenBatch, hidden: torch.Tensor, plan: ReusePlan
) -> tuple[TokenBatch, torch.Tensor, ReusePlan]:
    """Batch, hidden states [tokens, hidden] and plan with the hits moved to the front, lengths in order."""
    if not plan.hits.any() or plan.hits.all():
        return batch, hidden, plan
    permutation = np.argsort(~plan.hits, kind="stable")
    batch, index = batch.reordered(permutation)
    return batch, hidden[index], plan.reordered(permutation)


def forward(
    model: PackedModel,
    batch: TokenBatch,
    hidden: torch.Tensor,
    plan: ReusePlan,
    segments: Mapping[int, Segment],
) -> torch.Tensor:
    """The last layer's output [tokens, hidden] from the first one's input, for a batch with hits first."""
    hits = int(plan.hits.sum())
    hit = batch.buckets(0, hits)
    misses, first_miss = batch.buckets(hits), int(batch.offsets[hits])
    layout = _Layout(
        all=hit + misses,
        hits=[ReusedBucket(bucket, _record_groups(batch, bucket, plan, segments)) for bucket in hit],
        first_miss=first_miss,
        misses=[bucket.counted_from(first_miss) for bucket in misses],
    )
    for number, layer in enumerate(model.layers):
        x = layer.attention_input(hidden)
        hidden = layer.finish(hidden, _context(number, layer, x, layout))
    return hidden


def _record_groups(
    batch: TokenBatch, bucket: Bucket, plan: ReusePlan, segments: Mapping[int, Segment]
) -> list[RecordGroup]:
    """The records of a bucket's hits, by length."""
    records = torch.from_numpy(plan.records)
    return [
        RecordGroup(segments[group.length], records[group.sequences])
        for group in batch.groups(bucket.first, bucket.first + bucket.count)
    ]


class _Layout(NamedTuple):
    """A batch laid out for attention, once for all layers. The misses are the last of its tokens."""

    all: list[Bucket]  # whose computed heads are computed
    hits: list[ReusedBucket]  # whose reused heads come from records
    misses: list[Bucket]  # whose reused heads are computed; their tokens are counted from `first_miss`
    first_miss: int  # token


def _context(number: int, layer: AttentionLayer, x: torch.Tensor, layout: _Layout) -> torch.Tensor:
    """maps @ V of all heads, [tokens, heads, head_dim], for x [tokens, hidden]."""
    value, query, key = layer.project(x)
    context = torch.empty_like(value)
    mask = layer.reused_heads
    if mask < layer.heads:
        for bucket in layout.all:
            _attend(layer, bucket, query, key, value[:, mask:], context[:, mask:])
    if mask:
        for bucket, groups in layout.hits:
            found = reused_context(groups, number, mask, bucket.spread(value[:, :mask]))
            bucket.collect(found.transpose(1, 2), context[:, :mask])
        if layout.misses:
            first = layout.first_miss
            query, key = layer.project_reused(x[first:])
            for bucket in layout.misses:
                _attend(layer, bucket, query, key, value[first:, :mask], context[first:, :mask])
    return context


def _attend(
    layer: AttentionLayer,
    bucket: Bucket,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
) -> None:
    """Write the context [tokens, heads, head_dim] of a bucket, all heads of these Q, K and V computed."""
    found = layer.attend(bucket.spread(query), bucket.spread(key), bucket.spread(value), bucket.mask)
    bucket.collect(found.transpose(1, 2), context)
