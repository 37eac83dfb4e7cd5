"""Run requests: which of them are a batch together, and by which way each batch is computed.

requests -> with chunks           -> blended.py, one by one
         -> with shared prefixes  -> behind stored keys and values (continued.py), or as trees (forward.py)
         -> others                -> one pass, in which the strategy may give maps (forward.py)
         => PrefillResult, in the caller's order
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attncache_core.engine.blended import run_blended
from attncache_core.engine.continued import run_continued
from attncache_core.engine.forward import forward_pass
from attncache_core.engine.request import PrefillRequest, PrefillResult, joined_results
from attncache_core.engine.targets import log_probabilities, token_states
from attncache_core.heads.vectors import finite_sequences
from attncache_core.reuse.storage.segment import RecordsChanged
from attncache_core.runtime.threads import one_thread, use_threads
from attncache_core.text.token_batch import TokenBatch, pack, pack_shared

if TYPE_CHECKING:
    from attncache_core.engine.prefill import PrefillEngine

# The parts of a batch: (whether its sequences have chunks, whether they share prefixes).
_PARTS = ((False, False), (False, True), (True, False), (True, True))


def run_requests(engine: PrefillEngine, requests: Sequence[PrefillRequest]) -> PrefillResult:
    """Run token sequences through the model, with the reuse that each request allows.

    Sequences that may reuse something, and sequences that share prefixes, are two batches. A sequence of
    chunks is a batch of its own. The caller must be in inference mode.
    """
    if not requests:
        return _run(engine, requests, share=False, blend=False)
    # A token of a shared prefix has one state for all sequences, and tokens that are stored have none.
    shared = [engine.shares_prefixes(own.takes_maps) and not own.reads_states for own in requests]
    blended = [own.blend is not None for own in requests]
    indices = [np.flatnonzero([own == key for own in zip(blended, shared, strict=True)]) for key in _PARTS]
    parts = [
        _run(engine, [requests[index] for index in own.tolist()], share=share, blend=blend)
        for own, (blend, share) in zip(indices, _PARTS, strict=True)
        if len(own)
    ]
    return parts[0] if len(parts) == 1 else joined_results(parts, [own for own in indices if len(own)])


def _run(
    engine: PrefillEngine, requests: Sequence[PrefillRequest], *, share: bool, blend: bool
) -> PrefillResult:
    """Run a batch.

    share: compute shared prefixes once, and take no maps. blend: all requests have chunks.
    """
    with threads_of(engine):
        return _run_blended(engine, requests) if blend else _run_packed(engine, requests, share=share)


@contextmanager
def threads_of(engine: PrefillEngine) -> Iterator[None]:
    """Let a pass in the `with` block use the engine's threads, and wake the helpers of the compiled stack."""
    # Torch and Faiss limit threads per calling thread, and another thread may have loaded the engine.
    use_threads(engine.threads)
    if engine.model.stack is None:
        yield
        return
    engine.model.stack.wake(engine.threads)
    with one_thread():
        yield


def _run_blended(engine: PrefillEngine, requests: Sequence[PrefillRequest]) -> PrefillResult:
    assert engine.key_values is not None
    parts = [run_blended(engine.model, engine.key_values.store, request) for request in requests]
    return parts[0] if len(parts) == 1 else joined_results(parts, list(np.arange(len(parts))[:, None]))


def _run_packed(engine: PrefillEngine, requests: Sequence[PrefillRequest], *, share: bool) -> PrefillResult:
    if share and engine.key_values:
        skipped = [engine.key_values.skipped(request.sequence_plan) for request in requests]
        store, modes = engine.key_values.store, engine.checkpoint.pooling.modes
        return run_continued(engine.model, store, requests, skipped, modes)
    started = time.perf_counter()
    batch = _packed(engine, requests, share).on(engine.model.device)
    reuse = np.array([request.takes_maps for request in requests], dtype=bool)
    lost = () if share else _prepare(engine, set(batch.lengths[reuse[batch.order]].tolist()))
    try:
        strategy = None if share else engine.strategy
        done = forward_pass(engine.model, batch, strategy, reuse[batch.order], engine.deciding)
    except RecordsChanged as changed:
        # The maps that were used may differ from the maps that were checked, so compute the batch again.
        again = [
            replace(request, reuse=request.reuse and len(request.ids) not in changed.lengths)
            for request in requests
        ]
        lost += _prepare(engine, changed.lengths)
        result = run_requests(engine, again)
        return replace(result, lost_lengths=lost + result.lost_lengths)
    batch, plan = done.batch, done.plan
    outputs = done.outputs.rows.cpu().numpy()
    finite = batch.in_callers_order(finite_sequences(batch, done.hidden, outputs))
    found = log_probabilities(engine.model, batch, done.hidden, requests)
    if found is not None:
        finite &= [bool(np.isfinite(own).all()) for own in found]
    return PrefillResult(
        outputs=batch.in_callers_order(outputs),
        finite=finite,
        outcomes=tuple(batch.in_callers_order(plan.outcomes())),
        similarities=batch.in_callers_order(plan.similarities),
        strangeness=batch.in_callers_order(plan.strangeness),
        tokens=int(batch.offsets[-1]),
        asked_tokens=sum(len(request.ids) for request in requests),
        cached_tokens=np.zeros(len(requests), dtype=np.int64),
        search_seconds=done.search_seconds,
        forward_seconds=time.perf_counter() - started - done.search_seconds,
        attention_seconds=done.attention_seconds,
        corrupt_records=plan.corrupt_records,
        lost_lengths=lost,
        log_probabilities=found,
        token_states=token_states(engine.model, batch, done.hidden, requests),
    )


def _packed(engine: PrefillEngine, requests: Sequence[PrefillRequest], share: bool) -> TokenBatch:
    plans = (request.sequence_plan for request in requests)
    prompt_tokens = [plan.prompt_tokens if plan else engine.tokenizer.prompt_tokens for plan in plans]
    sequences = [request.ids for request in requests]
    if not share:
        return pack(sequences, prompt_tokens)
    return pack_shared(sequences, prompt_tokens, [request.group for request in requests])


def _prepare(engine: PrefillEngine, lengths: Collection[int]) -> tuple[int, ...]:
    if not engine.strategy:
        return ()
    with engine.deciding:
        return engine.strategy.prepare(lengths)
