"""Run sequences of a causal model behind the keys and values that are stored of them.

requests -> Continuation -> the tokens that are not stored -> one compiled call, or layers and states
         => PrefillResult
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from attncache_core.engine.layers import NO_REUSED_MAPS, rows_of, run_layers, stack_outputs
from attncache_core.engine.request import PrefillRequest
from attncache_core.engine.result import BatchReport, PrefillResult
from attncache_core.engine.targets import log_probabilities
from attncache_core.heads.running import pooled
from attncache_core.heads.vectors import finite_sequences
from attncache_core.models import PackedModel
from attncache_core.native.stack import StackRows
from attncache_core.reuse.kv.block_file import DamagedBlock
from attncache_core.reuse.kv.continuation import Continuation, Continued
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.reuse.plan import Outcome
from attncache_core.runtime.threads import compiled_threads


def run_continued(
    model: PackedModel, store: KeyValueStore, requests: Sequence[PrefillRequest], skipped: Sequence[int]
) -> PrefillResult:
    """Run requests behind what is stored of them, and store what is computed.

    skipped: for each request, the tokens at the front that pooling leaves out.
    """
    started = time.perf_counter()
    sequences = [
        Continued(request.ids, request.prefix_key, count, request.group)
        for request, count in zip(requests, skipped, strict=True)
    ]
    with suppress(DamagedBlock), Continuation(store, sequences) as plan:
        return _run(model, plan, requests, started)
    with Continuation(store, sequences, load=False) as plan:
        return _run(model, plan, requests, started)


def _run(
    model: PackedModel, plan: Continuation, requests: Sequence[PrefillRequest], started: float
) -> PrefillResult:
    """Run what is not given, and store it. Raises DamagedBlock if a block that was loaded is damaged."""
    batch, compute = plan.batch, _by_layers if model.compiled_outputs is None else _compiled
    outputs, finite, rows, attention_seconds = compute(
        model, plan, any(request.reads_more for request in requests)
    )
    found: list[np.ndarray] | None = None
    if batch is not None and rows is not None:
        computed = plan.computed.tolist()
        of_computed = log_probabilities(model, batch, rows, [requests[index] for index in computed])
        if of_computed is not None:
            found = [np.zeros(0, dtype=np.float32)] * len(requests)
            for index, values in zip(computed, of_computed, strict=True):
                found[index] = values
                finite[index] &= np.isfinite(values).all()
    plan.finish(finite)
    tokens = len(batch.ids) if batch is not None else 0
    return PrefillResult(
        outputs,
        finite,
        (Outcome.NOT_SEARCHED,) * len(requests),
        plan.lengths,
        plan.given_tokens,
        BatchReport(tokens, time.perf_counter() - started, attention_seconds),
        log_probabilities=found,
    )


# The outputs of the sequences of a plan, float32 [sequences, d]; whether all numbers that were computed for
# each sequence are finite, bool [sequences]; the output of the last layer [rows, hidden], None if nobody
# reads it; and the seconds of attention.
_Computed = tuple[np.ndarray, np.ndarray, torch.Tensor | None, float]


def _compiled(model: PackedModel, plan: Continuation, reads_rows: bool) -> _Computed:
    """Compute a plan by one call of the compiled stack, which writes the slots and states of new blocks."""
    batch, hidden = plan.batch, None
    if batch is None:
        plan.wait_until_loaded()
        rows, slots = StackRows(_NOTHING, _NOTHING[1:], _NOTHING, _NOTHING[1:], _NOTHING[1:]), None
        rows = replace(rows, skipped=plan.skipped, pooling=plan.pooling())
    else:
        assert model.stack is not None
        model.stack.wake(compiled_threads())
        size = len(batch.ids), model.hidden_size
        hidden = torch.empty(size, dtype=torch.float32) if reads_rows else None
        rows, slots = rows_of(batch, skipped=plan.skipped, pooling=plan.pooling()), plan.slots()
    outputs, finite, seconds = stack_outputs(model, rows, compiled_threads(), slots=slots, hidden=hidden)
    plan.wait_until_loaded()
    return outputs, finite, hidden, seconds


_NOTHING = np.zeros(1, np.int64)  # the offsets of no run, and of no tree


def _by_layers(model: PackedModel, plan: Continuation, reads_rows: bool) -> _Computed:  # noqa: ARG001
    """Compute a plan layer by layer, and write the slots and states of new blocks."""
    batch = plan.batch
    if batch is None:
        plan.wait_until_loaded()
        outputs = outputs_of(model, plan.given_states(), plan.lengths, plan.skipped)
        return outputs, np.isfinite(outputs).all(axis=1), None, 0.0
    if model.stack is not None:
        model.stack.wake(compiled_threads())
    rows, seconds = run_layers(model, batch.on(model.device), None, NO_REUSED_MAPS, slots=plan.slots())
    plan.wait_until_loaded()
    states = plan.states(model.outputs.states(rows).cpu().numpy())
    outputs = outputs_of(model, states, plan.lengths, plan.skipped)
    finite = np.isfinite(outputs).all(axis=1)
    is_finite = finite_sequences(batch, rows, outputs[plan.computed[batch.order]])
    finite[plan.computed] = batch.in_callers_order(is_finite)
    return outputs, finite, rows, seconds


def outputs_of(
    model: PackedModel, states: np.ndarray, lengths: np.ndarray, skipped: np.ndarray
) -> np.ndarray:
    """Return the outputs of sequences with these states, float32 [sequences, d].

    states: float32 [sequences, 5, width]; see heads/running.py. lengths: the tokens of each sequence.
    skipped: of these tokens, at the front, the tokens that pooling leaves out.
    """
    vectors = pooled(states, lengths, skipped, model.outputs.pool.modes)
    return model.outputs.of_vectors(torch.from_numpy(vectors).to(model.device)).cpu().numpy()
