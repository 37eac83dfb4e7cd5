"""Run the layers of a model over a batch: the layer loop (Algorithm 2 of AttnCache).

    hidden -> layer: V of all heads; Q, K and maps of the computed heads       all sequences
                     maps of the reused heads are given                        the first sequences
                     Q, K and maps of the reused heads                         the other sequences
                     output projection and feed-forward half, refitted         hits on records of other texts
                     output projection and feed-forward half, original         the other sequences
           -> hidden

Sequences with reused maps come first in the batch, so Q, K and maps of the reused heads are computed on one
slice of tokens.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from attncache_core.models import AttentionLayer, PackedModel
from attncache_core.native.stack import (
    NO_RECORDS,
    CompiledStack,
    KeyValueSlots,
    ReusedRecords,
    StackRows,
    TreePooling,
)
from attncache_core.reuse.execution.reused_maps import ComputedHeads, HitRecords, RecordGroup, ReusedMaps
from attncache_core.reuse.execution.slots import SlotAttention
from attncache_core.reuse.plan import ReusePlan
from attncache_core.runtime.threads import compiled_threads, one_thread
from attncache_core.text.token_batch import TokenBatch


def reused_by(plan: ReusePlan, model: PackedModel, batch: TokenBatch) -> ReusedMaps:
    """Return the maps that a plan gives to a batch.

    The sequences with records must come first in the batch, and self-hits last among them, because all other
    hits take the refitted weights of the model, if it has any.
    """
    hits = int(np.count_nonzero(plan.hits))
    if not hits:
        return NO_REUSED_MAPS
    groups = [
        RecordGroup(plan.segments[group.length], plan.records[group.sequences])
        for group in batch.groups(0, hits)
    ]
    refitted = int((plan.hits & ~plan.self_hits).sum()) if model.refitted else 0
    return HitRecords(groups, refitted)


NO_REUSED_MAPS = HitRecords([])


def run_layers(
    model: PackedModel,
    batch: TokenBatch,
    hidden: torch.Tensor | None,
    reused_maps: ReusedMaps,
    layers: range | None = None,
    slots: KeyValueSlots | None = None,
) -> tuple[torch.Tensor, float]:
    """Run a range of the model's layers; None: all layers.

    hidden: input of the first layer of the range, [tokens, hidden]; None: the batch's embeddings. slots: keys
    and values of the tokens in front of the roots of the batch's tree, and places to keep those of its rows;
    no maps are given to such a batch. Returns the output of the last layer of the range, and the duration of
    attention in seconds: projections, maps, maps @ V and reading reused maps.
    """
    layers = range(len(model.layers)) if layers is None else layers
    records = reused_maps.records()
    if model.stack and records:
        return _run_stack(model, model.stack, batch, hidden, records, layers, slots)
    hidden = (model.embed(batch) if hidden is None else hidden).to(model.dtype)
    in_slots = SlotAttention(batch, slots) if slots else None
    refitted = int(batch.offsets[reused_maps.refitted])  # rows
    attention_seconds = 0.0
    for number in layers:
        layer = model.layers[number]
        started = time.perf_counter()
        x = layer.attention_input(hidden)
        if in_slots and slots and slots.only:
            in_slots.keep(number, layer, x)
            break
        context = (
            in_slots.context(number, layer, x)
            if in_slots
            else attention_context(number, layer, x, batch, reused_maps)
        )
        attention_seconds += time.perf_counter() - started
        hidden = model.finish(number, hidden, context, refitted)
    return hidden, attention_seconds


def run_to_outputs(
    model: PackedModel, batch: TokenBatch, records: ReusedRecords
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return what `stack_outputs` returns for a batch. records: of the first sequences, without a tree."""
    assert model.compiled_outputs is not None
    tree, none = batch.tree, np.zeros(0, np.int64)
    lengths = batch.lengths if tree is None else tree.lengths
    skipped = model.compiled_outputs.pool.skipped(lengths, batch.prompt_tokens)
    pooling = None
    if tree is not None:
        no_states = np.zeros(len(lengths), np.uint64)
        pooling = TreePooling(tree.parents, tree.ends, lengths, no_states, none, none)
    rows = rows_of(batch, skipped=skipped, pooling=pooling)
    return stack_outputs(model, rows, compiled_threads(), records)


def rows_of(
    batch: TokenBatch,
    *,
    embeds: bool = True,
    skipped: np.ndarray | None = None,
    pooling: TreePooling | None = None,
) -> StackRows:
    """Return the rows of a batch. embeds: whether the stack makes the first layer's input from token ids.

    skipped, pooling: see StackRows.
    """
    rows = StackRows(batch.offsets, skipped=skipped, pooling=pooling)
    if embeds:
        types = None if batch.types is None else batch.types.numpy()
        rows = replace(rows, ids=batch.ids.numpy(), types=types)
    if batch.tree is None:
        return rows
    return replace(rows, positions=batch.positions.numpy(), trees=batch.tree.trees, starts=batch.tree.starts)


def stack_outputs(
    model: PackedModel,
    rows: StackRows,
    threads: int,
    records: ReusedRecords = NO_RECORDS,
    slots: KeyValueSlots | None = None,
    hidden: torch.Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Run a model whose stack makes its outputs (`compiled_outputs`), by one call from token ids to vectors.

    records, slots, hidden: see CompiledStack.vectors. Returns the outputs float32 [sequences, d], whether all
    numbers computed for each sequence are finite, bool [sequences], and the seconds of attention as
    `run_layers` does.
    """
    stack, outputs_of = model.stack, model.compiled_outputs
    assert stack is not None
    assert outputs_of is not None
    outputs, finite, counts = stack.vectors(rows, threads, records, slots, hidden)
    if outputs_of.finishes:
        with one_thread():
            outputs = outputs_of.of_vectors(torch.from_numpy(outputs)).numpy()
        finite &= np.isfinite(outputs).all(axis=1)
    return outputs, finite, counts.attention_seconds


def first_input(model: PackedModel, batch: TokenBatch) -> torch.Tensor:
    """Return the input of the first layer, float32 or of the model's dtype [tokens, hidden]."""
    stack = model.stack
    if stack is None or not stack.embeds:
        return model.embed(batch)
    return stack.run(None, rows_of(batch), range(0))[0]


def _run_stack(
    model: PackedModel,
    stack: CompiledStack,
    batch: TokenBatch,
    hidden: torch.Tensor | None,
    records: ReusedRecords,
    layers: range,
    slots: KeyValueSlots | None,
) -> tuple[torch.Tensor, float]:
    """Run layers as `run_layers` does, by compiled code."""
    embeds = stack.embeds and hidden is None
    states: torch.Tensor | None = None
    if not embeds:
        # A copy in float32, because the stack overwrites its input.
        states = torch.empty(len(batch.ids), model.hidden_size, dtype=torch.float32)
        states.copy_(model.embed(batch) if hidden is None else hidden)
    rows = rows_of(batch, embeds=embeds)
    found, counts = stack.run(states, rows, layers, records, compiled_threads(), slots)
    # PackedModel.outputs takes float32 too, and layers that run one by one with slots
    # round nothing in between.
    is_last = layers.stop == len(model.layers)
    return found if is_last or slots else found.to(model.dtype), counts.attention_seconds


def attention_context(
    number: int, layer: AttentionLayer, x: torch.Tensor, batch: TokenBatch, reused_maps: ReusedMaps
) -> torch.Tensor:
    """Return maps @ V of all heads of a layer with input x [tokens, hidden]: [tokens, heads, head_dim]."""
    value, query, key = layer.project(x, batch.positions)
    context = torch.empty_like(value)
    mask = layer.reused_heads
    if mask < layer.heads:
        computed = ComputedHeads(number, layer, batch, query, key, value[:, mask:], context[:, mask:])
        reused_maps.attend(computed)
    if mask:
        reused_maps.apply(number, value[:, :mask], context[:, :mask])
        if reused_maps.count < len(batch.lengths):
            first = int(batch.offsets[reused_maps.count])
            query, key = layer.project_reused(x[first:], batch.positions[first:])
            offsets = batch.offsets[reused_maps.count :] - first
            reused = slice(mask)
            layer.attend(
                query, key, value[first:, reused], offsets, reused, context[first:, reused], batch.tree
            )
    return context
