"""Algorithm 2: a pass of a model over a batch in which some sequences reuse maps and others don't.

    batch -> first hidden states -> search (Algorithm 1) -> hits first, misses after -> layers -> outputs

Hits stand before misses. So what only misses need is computed on one slice of the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from attncache_core.attention_maps.fetch import Fetch, HitRecords, RecordGroup
from attncache_core.attention_maps.search import ReusePlan, SearchEngine, no_reuse
from attncache_core.attention_maps.store import Segment
from attncache_core.models import AttentionLayer, Outputs, PackedModel
from attncache_core.tokens import TokenBatch, rounded_up


@dataclass(frozen=True)
class ForwardPass:
    """What one pass computed: the batch with its hits first, and the rest in the order of that batch."""

    batch: TokenBatch
    hidden: torch.Tensor  # [tokens, hidden] of the last layer
    plan: ReusePlan
    outputs: Outputs
    search_seconds: float
    attention_seconds: float  # in all layers, up to the output projections


@torch.inference_mode()
def forward_pass(
    model: PackedModel,
    batch: TokenBatch,
    search: SearchEngine | None,
    allowed: np.ndarray,
    fetch: Fetch = Fetch.AUTO,
) -> ForwardPass:
    """Run a filled batch through the model.

    search: finds the records that serve; None: all is computed. allowed: bool [sequences], for each packed
    sequence whether reuse may be tried.
    """
    hidden = model.embed(batch)
    started = time.perf_counter()
    if search is None or not allowed.any():
        plan, segments = no_reuse(len(batch.lengths)), {}
    else:
        plan = search.plan(batch, model.search_input(hidden), allowed)
        segments = search.store.segments
    search_seconds = time.perf_counter() - started
    batch, hidden, plan = hits_first(batch, hidden, plan)
    hidden, attention_seconds = forward(model, batch, hidden, plan, segments, fetch)
    outputs = model.outputs(hidden, batch)
    return ForwardPass(batch, hidden, plan, outputs, search_seconds, attention_seconds)


def hits_first(
    batch: TokenBatch, hidden: torch.Tensor, plan: ReusePlan
) -> tuple[TokenBatch, torch.Tensor, ReusePlan]:
    """Batch, hidden states [tokens, hidden] and plan with the hits moved to the front.

    Lengths stay in order among hits and among misses, and hits of one record become neighbours.
    """
    if not plan.hits.any():
        return batch, hidden, plan
    permutation = np.lexsort((plan.records, batch.lengths, ~plan.hits))
    if (np.diff(permutation) == 1).all():
        return batch, hidden, plan
    batch, index = batch.reordered(permutation)
    return batch, hidden[index], plan.reordered(permutation)


def forward(
    model: PackedModel,
    batch: TokenBatch,
    hidden: torch.Tensor,
    plan: ReusePlan,
    segments: Mapping[int, Segment],
    fetch: Fetch = Fetch.AUTO,
) -> tuple[torch.Tensor, float]:
    """The last layer's output [tokens, hidden] from the first one's input, for a batch with hits first.

    Beside it the seconds that attention took in all layers: projections, maps, maps @ V, and fetching.
    """
    groups = [
        RecordGroup(segments[group.length], plan.records[group.sequences])
        for group in batch.groups(0, int(plan.hits.sum()))
    ]
    attention_seconds = 0.0
    with HitRecords(groups, fetch) as records:
        for number, layer in enumerate(model.layers):
            started = time.perf_counter()
            context = attention_context(number, layer, layer.attention_input(hidden), batch, records)
            attention_seconds += time.perf_counter() - started
            hidden = layer.finish(hidden, context)
    return hidden, attention_seconds


def attention_context(
    number: int, layer: AttentionLayer, x: torch.Tensor, batch: TokenBatch, records: HitRecords
) -> torch.Tensor:
    """maps @ V of all heads, [tokens, heads, head_dim], for x [tokens, hidden]."""
    value, query, key = layer.project(x, batch.positions)
    context = batch.context_like(value)
    mask = layer.reused_heads
    if mask < layer.heads:
        computed = slice(mask, layer.heads)
        layer.attend(query, key, value[:, computed], batch.offsets, computed, context[:, computed])
    if mask:
        records.apply(number, value[:, :mask], context[:, :mask])
        if records.count < len(batch.lengths):
            # A round number of tokens, as a filled batch has: some of the last hit's among them.
            first = max(0, len(x) - rounded_up(len(x) - int(batch.offsets[records.count])))
            query, key = layer.project_reused(x[first:], batch.positions[first:])
            offsets = batch.offsets[records.count :] - first
            reused = slice(mask)
            layer.attend(query, key, value[first:, reused], offsets, reused, context[first:, reused])
    return context
