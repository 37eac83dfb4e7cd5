"""Algorithm 2: the layers of a model over a packed batch in which some sequences reuse maps and others don't.

Hits stand before misses, each by length. So what only misses need is computed on one slice of the tokens,
and a group of sequences of one length and one kind is a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from attncache_core.attention_maps.fetch import reused_context
from attncache_core.attention_maps.search import ReusePlan
from attncache_core.attention_maps.store import Segment
from attncache_core.models import AttentionLayer, PackedModel
from attncache_core.tokens import Group, TokenBatch, by_sequence


class ReusedGroup(NamedTuple):
    """Hits of one length and the records that serve them."""

    group: Group
    segment: Segment
    records: torch.Tensor  # int64 [group.count]


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
    misses = batch.groups(hits)
    records = torch.from_numpy(plan.records)
    reused = [
        ReusedGroup(group, segments[group.length], records[group.sequences])
        for group in batch.groups(0, hits)
    ]
    for number, layer in enumerate(model.layers):
        x = layer.attention_input(hidden)
        hidden = layer.finish(hidden, _context(number, layer, x, reused, misses))
    return hidden


def _context(
    number: int, layer: AttentionLayer, x: torch.Tensor, reused: list[ReusedGroup], misses: list[Group]
) -> torch.Tensor:
    """maps @ V of all heads, [tokens, heads, head_dim], for x [tokens, hidden]."""
    value, query, key = layer.project(x)
    context = torch.empty_like(value)
    mask = layer.reused_heads
    if mask < layer.heads:
        for group in [hit.group for hit in reused] + misses:
            _attend(layer, group, query, key, value[:, mask:], context[:, mask:])
    if mask:
        for hit in reused:
            found = reused_context(
                hit.segment, hit.records, number, mask, by_sequence(value[:, :mask], hit.group)
            )
            by_sequence(context[:, :mask], hit.group).copy_(found.transpose(1, 2))
        if misses:
            _attend_misses(layer, misses, x, value[:, :mask], context[:, :mask])
    return context


def _attend_misses(
    layer: AttentionLayer, misses: list[Group], x: torch.Tensor, value: torch.Tensor, context: torch.Tensor
) -> None:
    """The context of the reused heads where no record serves; only the misses' tokens are projected."""
    first = misses[0].first_token
    query, key = layer.project_reused(x[first:])
    for group in misses:
        counted_from_first = replace(group, first_token=group.first_token - first)
        _attend(layer, counted_from_first, query, key, value[first:], context[first:])


def _attend(
    layer: AttentionLayer,
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: torch.Tensor,
) -> None:
    """Write the context [tokens, heads, head_dim] of a group, all heads of these Q, K and V computed."""
    found = layer.attend(by_sequence(query, group), by_sequence(key, group), by_sequence(value, group))
    by_sequence(context, group).copy_(found.transpose(1, 2))
