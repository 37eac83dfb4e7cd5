"""Run requests: which of them are a batch together, and by which way each batch is computed.

requests -> nothing to reuse      -> one compiled call, from token ids to vectors
         -> with chunks           -> blended.py, one by one
         -> with shared prefixes  -> behind stored keys and values (continued.py), or as trees (forward.py)
         -> others                -> one pass, in which the strategy may give maps (forward.py)
         => PrefillResult, in the caller's order
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from attncache_core.engine.blended import run_blended
from attncache_core.engine.continued import run_continued
from attncache_core.engine.forward import forward_pass
from attncache_core.engine.layers import stack_outputs
from attncache_core.engine.request import PrefillBatch, PrefillRequest
from attncache_core.engine.result import BatchReport, Compared, PrefillResult, joined
from attncache_core.engine.targets import log_probabilities, token_states
from attncache_core.models import PackedModel
from attncache_core.native.stack import StackRows
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.reuse.plan import outcomes_of, shared_no_reuse
from attncache_core.reuse.storage.segment import RecordsChanged
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.runtime.threads import one_thread, use_threads
from attncache_core.text.token_batch import TokenBatch, pack, pack_shared, require_tokens
from attncache_core.text.tokenizer import TextTokenizer


class RunCounter:
    """Counts the runs of an engine, at present and since the start. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = self._begun = 0

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1
            self._begun += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1

    def idle_mark(self) -> int | None:
        """Return a number that changes whenever a run begins, or None while a run computes."""
        with self._lock:
            return None if self._running else self._begun


@contextmanager
def threads_of(model: PackedModel, threads: int, *, wake: bool = True) -> Iterator[None]:
    """Let a pass in the `with` block use this many threads.

    wake: whether layers run at once, so that the helpers of the compiled stack are woken.
    """
    # Torch and Faiss limit threads per calling thread, and another thread may have loaded the model.
    use_threads(threads)
    if model.stack is None:
        yield
        return
    if wake:
        model.stack.wake(threads)
    with one_thread():
        yield


@dataclass(frozen=True, eq=False, kw_only=True)
class Runner:
    """A model and what its batches may reuse. Any number of threads may call `run` at once."""

    model: PackedModel
    tokenizer: TextTokenizer
    threads: int  # of one batch
    strategy: ReuseStrategy | None = None
    share_prefixes: bool = True  # of several sequences of a batch, if the model is causal
    key_values: KeyValueReuse | None = None
    deciding: threading.Lock = field(default_factory=threading.Lock)  # held while the strategy is called
    runs: RunCounter = field(default_factory=RunCounter)

    def shares_prefixes(self, reuse: bool) -> bool:
        """Return whether requests with this `reuse` are computed as trees of shared prefixes.

        This needs a causal model, in which no token depends on a later token. A strategy decides about whole
        sequences, so requests that may reuse something are computed one by one.
        """
        return self.share_prefixes and self.model.is_causal and not (reuse and self.strategy)

    @torch.inference_mode()
    def run(self, requests: Sequence[PrefillRequest]) -> PrefillResult:
        """Run token sequences through the model, with the reuse that each request allows.

        Sequences that may reuse something, and sequences that share prefixes, are two batches. A sequence of
        chunks is a batch of its own.
        """
        with self.runs:
            return self._run_all(requests)

    def _run_all(self, requests: Sequence[PrefillRequest]) -> PrefillResult:
        if not requests:
            return self._run(requests, share=False, blend=False)
        batch = PrefillBatch.of(requests)
        lost, reasons = self._ruled_out(batch)
        if reasons is not None:
            return self._run_exact(batch, reasons)
        result = self._run_parts(list(requests))
        return _with_lost(result, lost) if lost else result

    def _ruled_out(self, batch: PrefillBatch) -> tuple[tuple[int, ...], np.ndarray | None]:
        """Return the lengths that were lost, and the outcome_code of each sequence.

        The codes are None if something may be reused, or if the compiled stack does not compute everything.
        """
        is_exact = self._makes_vectors(batch)
        if not self.strategy or not (allowed := batch.takes_maps).any():
            return (), shared_no_reuse(len(batch)).reasons if is_exact else None
        lengths = np.diff(batch.offsets)
        with self.deciding:
            reasons = self.strategy.rule_out(lengths, allowed) if is_exact else None
            if reasons is not None:
                return (), reasons
            return self.strategy.prepare(set(lengths[allowed].tolist())), None

    def _run_parts(self, requests: Sequence[PrefillRequest]) -> PrefillResult:
        """Run requests in up to four batches: with chunks or without, with shared prefixes or without."""
        # A token of a shared prefix has one state for all sequences, and tokens that are stored have none.
        keys = [
            (request.blend is not None, self.shares_prefixes(request.takes_maps) and not request.reads_states)
            for request in requests
        ]
        if len(set(keys)) == 1:
            blend, share = keys[0]
            return self._run(requests, share=share, blend=blend)
        ways = sorted(set(keys))
        indices = [np.flatnonzero([each == key for each in keys]) for key in ways]
        parts = [
            self._run([requests[index] for index in chosen.tolist()], share=share, blend=blend)
            for chosen, (blend, share) in zip(indices, ways, strict=True)
        ]
        return joined(parts, indices)

    def _makes_vectors(self, batch: PrefillBatch) -> bool:
        """Return whether the compiled stack makes all that is read from a batch, by itself."""
        if self.model.compiled_outputs is None:
            return False
        if self.model.is_causal and any(map(self.shares_prefixes, set(batch.takes_maps.tolist()))):
            return False  # the batch is a tree, or continues what is stored
        return not any(part.blends or part.reads_more for part in batch.parts)

    def _run_exact(self, batch: PrefillBatch, reasons: np.ndarray) -> PrefillResult:
        """Compute a batch by one call of the compiled stack. Nothing is reused, and nothing is stored.

        reasons: the outcome_code of each sequence.
        """
        started = time.perf_counter()
        count, stack, outputs_of = len(batch), self.model.stack, self.model.compiled_outputs
        assert stack is not None
        assert outputs_of is not None
        stack.wake(self.threads)
        offsets = batch.offsets
        lengths = np.diff(offsets)
        require_tokens(lengths)
        skipped = outputs_of.pool.skipped(lengths, batch.prompt_tokens(self.tokenizer.prompt_tokens))
        rows = StackRows(offsets, ids=batch.ids, types=batch.types, skipped=skipped)
        outputs, finite, attention_seconds = stack_outputs(self.model, rows, self.threads)
        return PrefillResult(
            outputs,
            finite,
            tuple(outcomes_of(reasons)),
            lengths,
            np.zeros(count, np.int64),
            BatchReport(int(offsets[-1]), time.perf_counter() - started, attention_seconds),
        )

    def _run(self, requests: Sequence[PrefillRequest], *, share: bool, blend: bool) -> PrefillResult:
        """Run a batch.

        share: compute shared prefixes once, and take no maps. blend: all requests have chunks.
        """
        # A pass behind a search, or behind a look into the store, wakes helpers itself.
        wakes = not blend and (self.key_values if share else self.strategy) is not None
        with threads_of(self.model, self.threads, wake=not wakes):
            return self._run_blended(requests) if blend else self._run_packed(requests, share=share)

    def _run_blended(self, requests: Sequence[PrefillRequest]) -> PrefillResult:
        assert self.key_values is not None
        parts = [run_blended(self.model, self.key_values.store, request) for request in requests]
        return parts[0] if len(parts) == 1 else joined(parts, [[index] for index in range(len(parts))])

    def _run_packed(self, requests: Sequence[PrefillRequest], *, share: bool) -> PrefillResult:
        if share and self.key_values:
            skipped = [self.key_values.skipped(request.sequence_plan) for request in requests]
            return run_continued(self.model, self.key_values.store, requests, skipped)
        started = time.perf_counter()
        batch = self._packed(requests, share).on(self.model.device)
        try:
            strategy = None if share else self.strategy
            allowed = np.array([request.takes_maps for request in requests])[batch.order]
            reads_hidden = any(request.reads_more for request in requests)
            done = forward_pass(
                self.model, batch, strategy, allowed, self.deciding, reads_hidden=reads_hidden
            )
        except RecordsChanged as changed:
            # The maps that were used may differ from the maps that were checked, so compute the batch again.
            again = [
                replace(request, reuse=request.reuse and len(request.ids) not in changed.lengths)
                for request in requests
            ]
            with self.deciding:
                lost = strategy.prepare(changed.lengths) if strategy else ()
            result = self._run_all(again)
            return _with_lost(result, lost)
        batch, plan = done.batch, done.plan
        finite, found, states = batch.in_callers_order(done.finite), None, None
        if reads_hidden:
            assert done.hidden is not None
            found = log_probabilities(self.model, batch, done.hidden, requests)
            states = token_states(self.model, batch, done.hidden, requests)
        if found is not None:
            finite &= [bool(np.isfinite(values).all()) for values in found]
        report = BatchReport(
            tokens=int(batch.offsets[-1]),
            forward_seconds=time.perf_counter() - started - done.search_seconds,
            attention_seconds=done.attention_seconds,
            search_seconds=done.search_seconds,
            corrupt_records=plan.corrupt_records,
        )
        compared = Compared(*map(batch.in_callers_order, (plan.similarities, plan.strangeness)))
        return PrefillResult(
            batch.in_callers_order(done.outputs),
            finite,
            tuple(batch.in_callers_order(plan.outcomes())),
            np.array([len(request.ids) for request in requests], np.int64),
            np.zeros(len(requests), np.int64),
            report,
            compared if strategy else None,
            found,
            states,
        )

    def _packed(self, requests: Sequence[PrefillRequest], share: bool) -> TokenBatch:
        plans = [request.sequence_plan for request in requests]
        prompt_tokens = [plan.prompt_tokens if plan else self.tokenizer.prompt_tokens for plan in plans]
        sequences = [request.ids for request in requests]
        if not share:
            return pack(sequences, prompt_tokens)
        groups: list[Hashable] = [request.group for request in requests]
        if outputs := self.model.compiled_outputs:
            lengths = np.array([len(ids) for ids in sequences])
            skipped = outputs.pool.skipped(lengths, np.array(prompt_tokens))
            if skipped is not None:
                # The stack pools the tokens that the sequences of a tree share once, for all of them.
                groups = list(zip(groups, skipped.tolist(), strict=True))
        return pack_shared(sequences, prompt_tokens, groups)


def _with_lost(result: PrefillResult, lengths: tuple[int, ...]) -> PrefillResult:
    """Return a result whose report names other lengths that were lost, too."""
    lost = lengths + result.report.lost_lengths
    return replace(result, report=result.report._replace(lost_lengths=lost))
