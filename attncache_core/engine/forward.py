"""Run a model over a batch: embed, plan the reuse, run the layers, pool.

batch -> strategy.plan -> (first hidden states -> strategy.refine) -> hits first
      -> one compiled call, from token ids to outputs; or layers, then outputs  -> strategy.commit
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from attncache_core.engine.layers import first_input, reused_by, run_layers, run_to_outputs
from attncache_core.heads.vectors import finite_sequences
from attncache_core.models import PackedModel
from attncache_core.reuse.plan import ReusePlan, shared_no_reuse
from attncache_core.reuse.storage.segment import RecordsChanged, Segment
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.runtime.threads import compiled_threads
from attncache_core.text.token_batch import TokenBatch


@dataclass(frozen=True)
class ForwardPass:
    """The result of one pass. Everything is in the packed order of `batch`, with the hits first."""

    batch: TokenBatch
    plan: ReusePlan
    outputs: np.ndarray  # float32 [sequences, d]
    finite: np.ndarray  # bool [sequences], whether all numbers computed for each sequence are finite
    hidden: torch.Tensor | None  # output of the last layer, [tokens, hidden], if it is read
    search_seconds: float  # of planning and refining
    attention_seconds: float  # of attention in all layers, without the output projections


@torch.inference_mode()
def forward_pass(
    model: PackedModel,
    batch: TokenBatch,
    strategy: ReuseStrategy | None,
    allowed: np.ndarray,
    deciding: AbstractContextManager[object] | None = None,
    *,
    reads_hidden: bool = False,
) -> ForwardPass:
    """Run a batch through the model.

    strategy: decides what is reused; None: everything is computed. allowed: bool [sequences], whether each
    packed sequence may reuse anything. A batch with a tree needs strategy None. deciding: a lock that is held
    while the strategy is called; None: no other thread calls the strategy. reads_hidden: whether the caller
    reads the output of the last layer. Raises RecordsChanged if the file of records that were used changed
    after their check, or could not be read.
    """
    plan, search_seconds = shared_no_reuse(len(batch.order)), 0.0
    deciding = deciding or nullcontext()
    changes: dict[int, int] = {}  # Segment.changes of each length when the plan first named the segment
    if strategy:
        started = time.perf_counter()
        with deciding:
            plan = strategy.plan(batch, allowed)
            _note_changes(plan, batch, changes)
        search_seconds = time.perf_counter() - started
    hidden: torch.Tensor | None = None  # None: the layers begin with the embeddings
    embeds = model.stack is not None and model.stack.embeds
    makes_outputs = model.compiled_outputs is not None and not reads_hidden
    outputs: np.ndarray | None = None
    attention_seconds, first, end = 0.0, 0, len(model.layers)
    segments: set[Segment] = set()  # whose records were used
    while first < end:
        if strategy and plan.until <= first:
            states = first_input(model, batch) if hidden is None else hidden
            attended = model.layers[first].attention_input(states.to(model.dtype))
            started = time.perf_counter()
            with deciding:
                plan = strategy.refine(plan, batch, attended)
                _note_changes(plan, batch, changes)
            assert plan.until > first
            search_seconds += time.perf_counter() - started
            # The stack embeds the tokens again, in the order of the hits, faster than rows are moved.
            hidden = None if embeds and first == 0 else states
        if strategy:
            batch, hidden, plan = hits_first(batch, hidden, plan, neighbours=model.stack is None)
        layers = range(first, min(plan.until, end))
        reused_maps = reused_by(plan, model, batch)
        records = reused_maps.records()
        if strategy and model.stack:
            model.stack.wake(compiled_threads())
        if makes_outputs and records is not None and len(layers) == end:
            outputs, finite, seconds = run_to_outputs(model, batch, records)
        else:
            hidden, seconds = run_layers(model, batch, hidden, reused_maps, layers)
        attention_seconds += seconds
        if strategy:
            lengths = set(batch.lengths[plan.hits].tolist())
            segments.update(plan.segments[length] for length in lengths)
        first = layers.stop
    if outputs is None:
        assert hidden is not None
        outputs = model.outputs(hidden, batch).cpu().numpy()
        finite = finite_sequences(batch, hidden, outputs)
    changed = [segment for segment in segments if not segment.is_as_checked(changes[segment.length])]
    if changed:
        raise RecordsChanged(sorted(changed, key=lambda segment: segment.length))
    if strategy:
        with deciding:
            strategy.commit(plan, batch)
    return ForwardPass(batch, plan, outputs, finite, hidden, search_seconds, attention_seconds)


def _note_changes(plan: ReusePlan, batch: TokenBatch, changes: dict[int, int]) -> None:
    """Write Segment.changes of each length of the batch to `changes`, unless it is noted already."""
    for length in set(batch.lengths.tolist()) & plan.segments.keys() if plan.segments else ():
        changes.setdefault(length, plan.segments[length].changes)


def hits_first(
    batch: TokenBatch, hidden: torch.Tensor | None, plan: ReusePlan, *, neighbours: bool = True
) -> tuple[TokenBatch, torch.Tensor | None, ReusePlan]:
    """Return batch, hidden states [tokens, hidden], if any, and plan with the hits moved to the front.

    Hits on records of other texts come first, then self-hits, then misses: each of these takes weights of its
    own, or needs more of them. Each part is sorted by length. neighbours: hits of one record become
    neighbours, which the plain executor computes together.
    """
    if len(plan.records) == 1 or not np.count_nonzero(plan.hits):
        return batch, hidden, plan
    records = plan.records if neighbours else np.zeros_like(plan.records)
    permutation = np.lexsort((records, batch.lengths, plan.self_hits, ~plan.hits))
    if (np.diff(permutation) == 1).all():
        return batch, hidden, plan
    batch, index = batch.reordered(permutation)
    return batch, None if hidden is None else hidden[index], plan.reordered(permutation)
