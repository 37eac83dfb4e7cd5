"""Run sequences of a causal model behind the keys and values that are stored of them.

requests -> Continuation -> the tokens that are not stored -> layers -> states -> PrefillResult
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from attncache_core.engine.layers import NO_GIVEN_MAPS, run_layers
from attncache_core.engine.request import PrefillRequest, PrefillResult
from attncache_core.engine.targets import log_probabilities
from attncache_core.heads.running import LAST, pooled
from attncache_core.heads.vectors import finite_sequences
from attncache_core.models import PackedModel
from attncache_core.reuse.kv.block_file import DamagedBlock
from attncache_core.reuse.kv.continuation import Continuation, Continued
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.reuse.plan import shared_no_reuse


def run_continued(
    model: PackedModel,
    store: KeyValueStore,
    requests: Sequence[PrefillRequest],
    skipped: Sequence[int],
    modes: Sequence[str],
) -> PrefillResult:
    """Run requests behind what is stored of them, and store what is computed.

    skipped: for each request, the tokens at the front that pooling leaves out. modes: of pooling, unless the
    model has classes.
    """
    started = time.perf_counter()
    sequences = [
        Continued(request.ids, request.prefix_key, count, request.group)
        for request, count in zip(requests, skipped, strict=True)
    ]
    with suppress(DamagedBlock), Continuation(store, sequences) as plan:
        return _run(model, plan, requests, modes, started)
    with Continuation(store, sequences, load=False) as plan:
        return _run(model, plan, requests, modes, started)


def _run(
    model: PackedModel,
    plan: Continuation,
    requests: Sequence[PrefillRequest],
    modes: Sequence[str],
    started: float,
) -> PrefillResult:
    """Run what is not given, and store it. Raises DamagedBlock if a block that was loaded is damaged."""
    final, batch = model.final, plan.batch
    assert final is not None
    found: list[np.ndarray] | None = None
    hidden, attention_seconds = None, 0.0
    if batch is not None:
        batch = batch.on(model.device)
        rows, attention_seconds = run_layers(model, batch, None, NO_GIVEN_MAPS, slots=plan.slots())
        hidden = final.states(rows).cpu().numpy()
    plan.wait_until_loaded()
    states, new_states = plan.states(hidden)
    outputs = outputs_of(model, states, plan.lengths, plan.skipped, modes)
    finite = np.isfinite(outputs).all(axis=1)
    if batch is not None:
        own = finite_sequences(batch, rows, outputs[plan.computed[batch.order]])
        finite[plan.computed] = batch.in_callers_order(own)
        computed = [requests[index] for index in plan.computed.tolist()]
        found = _of_all(log_probabilities(model, batch, rows, computed), plan.computed, len(requests))
        if found is not None:
            finite &= [bool(np.isfinite(own).all()) for own in found]
    plan.finish(new_states, finite)
    nothing = shared_no_reuse(len(requests))
    return PrefillResult(
        outputs=outputs,
        finite=finite,
        outcomes=tuple(nothing.outcomes()),
        similarities=nothing.similarities,
        strangeness=nothing.strangeness,
        tokens=len(batch.ids) if batch is not None else 0,
        asked_tokens=int(plan.lengths.sum()),
        cached_tokens=plan.given_tokens,
        search_seconds=0.0,
        forward_seconds=time.perf_counter() - started,
        attention_seconds=attention_seconds,
        corrupt_records=0,
        log_probabilities=found,
    )


def outputs_of(
    model: PackedModel, states: np.ndarray, lengths: np.ndarray, skipped: np.ndarray, modes: Sequence[str]
) -> np.ndarray:
    """Return the outputs of sequences with these states, float32 [sequences, d].

    states: float32 [sequences, 5, width]; see heads/running.py. lengths: the tokens of each sequence.
    skipped: of these tokens, at the front, the tokens that pooling leaves out.
    """
    assert model.final is not None
    logits = model.final.logits(torch.from_numpy(states[:, LAST]).to(model.device))
    if logits is not None:
        return logits.cpu().numpy()
    vectors = pooled(states, lengths, skipped, modes)
    if model.embedding_head is None:
        return vectors
    return model.embedding_head(torch.from_numpy(vectors).to(model.device)).cpu().numpy()


def _of_all(found: list[np.ndarray] | None, computed: np.ndarray, count: int) -> list[np.ndarray] | None:
    """Return the log-probabilities of all requests. found: of the computed ones; the others have none."""
    if found is None:
        return None
    own = iter(found)
    is_computed = np.zeros(count, dtype=bool)
    is_computed[computed] = True
    return [next(own) if each else np.zeros(0, dtype=np.float32) for each in is_computed.tolist()]
