"""Run one sequence of chunks whose keys and values are given, and compute some tokens again (CacheBlend).

    chunks that are not stored -> computed by themselves, and stored
    layers before the check    -> every token behind the exact beginning
    check layer                -> keys and values of these tokens -> the tokens that deviate most go on
    every later step of layers -> the tokens that went on, behind given keys and values; fewer go on

Tokens that are not given, such as the query, are computed in every layer. Nothing of this pass is stored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from attncache_core.engine.continued import outputs_of, run_continued
from attncache_core.engine.layers import NO_REUSED_MAPS, run_layers
from attncache_core.engine.request import PrefillRequest
from attncache_core.engine.result import BatchReport, PrefillResult
from attncache_core.engine.targets import log_probabilities
from attncache_core.heads.running import LAST, empty_states
from attncache_core.models import PackedModel
from attncache_core.native.memory import address
from attncache_core.native.stack import KeyValueSlots
from attncache_core.reuse.blend.chunks import (
    LAYERS_A_STEP,
    Blend,
    BlendReport,
    ChunkReport,
    Recomputation,
    deviations,
)
from attncache_core.reuse.blend.given import GivenChunks
from attncache_core.reuse.blend.loading import ratio_beside_loading
from attncache_core.reuse.kv.block_file import DamagedBlock
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.reuse.plan import Outcome
from attncache_core.text.prefix_tree import PrefixTree
from attncache_core.text.token_batch import TokenBatch


def run_blended(model: PackedModel, store: KeyValueStore, request: PrefillRequest) -> PrefillResult:
    """Run a request with chunks. The outputs read its last token only."""
    started = time.perf_counter()
    blend = request.blend
    assert blend is not None
    cached = [store.givable_tokens(chunk.prefix_key) for chunk in blend.chunks]
    missing = [
        PrefillRequest(
            np.frombuffer(chunk.prefix_key.tokens, dtype="<i4").tolist(), prefix_key=chunk.prefix_key
        )
        for chunk, tokens in zip(blend.chunks, cached, strict=True)
        if tokens < chunk.skipped + chunk.length
    ]
    computed = 0
    if missing:
        # Otherwise the missing chunks could push out the others.
        with store.holding([chunk.prefix_key for chunk in blend.chunks]):
            computed = run_continued(model, store, missing, [0] * len(missing)).report.tokens
    found: BlendedPass | None = None
    with (
        suppress(DamagedBlock),
        GivenChunks(store, blend, request.prefix_key, len(request.ids)) as chunks,
    ):
        found = BlendedPass(model, store, request.ids, blend, chunks)
    if found is None:
        with GivenChunks(store, blend, request.prefix_key, len(request.ids), load=False) as chunks:
            found = BlendedPass(model, store, request.ids, blend, chunks)
    return _result(model, request, blend, found, cached, computed, started)


class BlendedPass:
    """One pass over a sequence whose chunks are given."""

    def __init__(
        self, model: PackedModel, store: KeyValueStore, ids: Sequence[int], blend: Blend, cached: GivenChunks
    ) -> None:
        """Run all layers. Raises DamagedBlock if what is given is damaged."""
        self._model, self._store, self._given = model, store, cached
        self._ids = torch.tensor(ids)
        layout = store.layout
        self._dtype = model.stack.dtype if model.stack else model.dtype
        tokens = -(-len(ids) // BLOCK_TOKENS) * BLOCK_TOKENS
        # Of the layers that are computed together.
        self._slots = np.zeros((min(LAYERS_A_STEP, layout.layers), tokens, layout.slot_bytes), np.uint8)
        self.deviations: np.ndarray | None = None
        self.rows: list[int] = []  # that each layer computed
        self.attention_seconds = 0.0
        self.computed = np.zeros(len(ids), dtype=bool)  # the tokens that the check layer computed
        self.exact_tokens = cached.exact_tokens
        self.is_exact = False  # whether all keys and values that are given are those of `exact_tokens`
        self._run(blend)
        cached.finish()

    def _run(self, blend: Blend) -> None:
        always = self._always_computed(blend)
        # The tokens that are given approximately, as far as they are still computed.
        chosen = np.flatnonzero(self._given.is_given & ~always)
        chosen = chosen[chosen >= self.exact_tokens]
        loaded = self._given.loaded_tokens
        again = _beside_loading(blend.recomputation, self._store, loaded, len(chosen))
        layers = len(self._model.layers)
        counts = again.counts(len(chosen), layers)
        self.is_exact = not len(chosen)
        check = min(again.check_layer, layers)
        if not counts[0]:
            chosen = chosen[:0]
        rows = np.sort(np.concatenate([np.flatnonzero(always), chosen]))
        hidden: torch.Tensor | None = None
        while len(self.rows) < layers:
            step = self._given.loaded(_step(counts, len(self.rows)))
            self._given.fill(step, self._slots)
            if step.start == check and counts[check] < len(chosen):
                deviation = self._compared(step, hidden, rows, chosen)
                self.deviations = np.full(len(self._ids), np.nan, dtype=np.float32)
                self.deviations[chosen] = deviation
                chosen = chosen[again.picked(deviation, counts[check])]
                rows, hidden = _kept(rows, hidden, always, chosen)
            last = self._slots[len(step) - 1]
            before = last[chosen]
            # Their slots replace the given ones.
            addresses = address(self._slots) + rows * self._slots.shape[2]
            hidden = self._layers(step, hidden, rows, self._key_value_slots(step, addresses))
            self.rows += [len(rows)] * len(step)
            if step.start <= check:
                self.computed[:] = False
                self.computed[rows] = True
            following = counts[step.stop] if step.stop < layers else len(chosen)
            if step.stop > check and following < len(chosen):
                deviation = deviations(before, last[chosen], self._dtype)
                chosen = chosen[again.picked(deviation, following)]
                rows, hidden = _kept(rows, hidden, always, chosen)
        assert hidden is not None
        self.hidden = hidden

    def _always_computed(self, blend: Blend) -> np.ndarray:
        """Return the tokens that every layer computes, bool [tokens]."""
        always = ~self._given.is_given
        for chunk in blend.chunks:
            first_tokens = min(blend.recomputation.first_tokens, chunk.length)
            always[chunk.first : chunk.first + first_tokens] = True
        always[: self.exact_tokens] = False
        always[-1] = True  # the outputs read it
        return always

    def _compared(
        self, step: range, hidden: torch.Tensor | None, rows: np.ndarray, chosen: np.ndarray
    ) -> np.ndarray:
        """Return how much the slots of tokens `chosen`, among `rows`, deviate from the given ones.

        They are the slots of the first of these layers.
        """
        computed = np.zeros((len(rows), self._slots.shape[2]), dtype=np.uint8)
        addresses = address(computed) + np.arange(len(rows)) * computed.shape[1]
        self._layers(step[:1], hidden, rows, self._key_value_slots(step[:1], addresses, only=True))
        return deviations(self._slots[0, chosen], computed[np.searchsorted(rows, chosen)], self._dtype)

    def _layers(
        self, step: range, hidden: torch.Tensor | None, rows: np.ndarray, slots: KeyValueSlots
    ) -> torch.Tensor:
        positions = torch.from_numpy(rows)
        batch = _one_run(self._ids[positions], len(self._ids), positions).on(self._model.device)
        found, seconds = run_layers(self._model, batch, hidden, NO_REUSED_MAPS, step, slots=slots)
        self.attention_seconds += seconds
        return found

    def _key_value_slots(self, step: range, kept: np.ndarray, *, only: bool = False) -> KeyValueSlots:
        """kept: addresses of the slots of the rows in the first of these layers."""
        _, tokens, width = self._slots.shape
        block = BLOCK_TOKENS * width
        addresses = address(self._slots) + block * np.arange(tokens // BLOCK_TOKENS)
        # The compiled code counts from layer 0 of the model.
        before = step.start * tokens * width
        return KeyValueSlots(
            BLOCK_TOKENS,
            tokens * width,
            (addresses - before).astype(np.uint64),
            np.array([0, len(addresses)]),
            (kept - before).astype(np.uint64),
            np.arange(len(kept)),
            scattered=True,
            only=only,
        )


def _step(counts: Sequence[int], first: int) -> range:
    """Return the layers from `first` on that compute as many tokens as `first` does, up to LAYERS_A_STEP."""
    end = min(len(counts), first + LAYERS_A_STEP)
    return range(first, next((layer for layer in range(first, end) if counts[layer] != counts[first]), end))


def _beside_loading(again: Recomputation, store: KeyValueStore, loaded: int, tokens: int) -> Recomputation:
    """Return a recomputation of more tokens, if computing them takes no longer than loading what is given."""
    transfers = store.transfers
    if not loaded or transfers is None or not transfers.load_speed * transfers.prefill_speed:
        return again
    load_seconds = store.layout.token_bytes * loaded / transfers.load_speed
    ratio = ratio_beside_loading(again.ratio, load_seconds, transfers.prefill_speed, tokens)
    return replace(again, ratio=ratio)


def _kept(
    rows: np.ndarray, hidden: torch.Tensor | None, always: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, torch.Tensor | None]:
    """Return the rows that go on, with their hidden states: those of `always` and `chosen`.

    always: bool [tokens]. chosen: positions, int64.
    """
    stay = always.copy()
    stay[chosen] = True
    index = np.flatnonzero(stay[rows])
    return rows[index], None if hidden is None else hidden[torch.from_numpy(index)]


def _result(
    model: PackedModel,
    request: PrefillRequest,
    blend: Blend,
    found: BlendedPass,
    cached: Sequence[int],
    computed: int,
    started: float,
) -> PrefillResult:
    """Return the result of a pass.

    cached: tokens of each chunk that were stored before. computed: tokens of other chunks.
    """
    # Every layer computed the tokens behind the chunks, unless they belong to the exact beginning.
    end = max(chunk.first + chunk.length for chunk in blend.chunks)
    first = min(max(end, found.exact_tokens), len(request.ids) - 1)
    states = empty_states(1, model.hidden_size)
    states[0, LAST] = model.outputs.states(found.hidden[-1:]).cpu().numpy()
    outputs = outputs_of(model, states, np.array([len(request.ids)]), np.zeros(1, np.int64))
    read = _one_run(torch.tensor(request.ids[first:]), first)
    of_targets = log_probabilities(model, read, found.hidden[-len(read.ids) :], [request])
    finite = bool(np.isfinite(outputs).all() and torch.isfinite(found.hidden.sum(1)).all())
    if of_targets is not None:
        finite &= bool(np.isfinite(of_targets[0]).all())
    report = _report(blend, found, cached, computed)
    tokens = computed + sum(found.rows) // len(found.rows)
    return PrefillResult(
        outputs,
        np.array([finite]),
        (Outcome.NOT_SEARCHED,),
        np.array([len(request.ids)]),
        np.array([sum(max(0, chunk.cached - chunk.recomputed) for chunk in report.chunks)]),
        BatchReport(tokens, time.perf_counter() - started, found.attention_seconds),
        log_probabilities=of_targets,
        blends=[report],
    )


def _report(blend: Blend, found: BlendedPass, cached: Sequence[int], computed: int) -> BlendReport:
    chunks = []
    for chunk, before in zip(blend.chunks, cached, strict=True):
        again = int(found.computed[chunk.first : chunk.first + chunk.length].sum())
        chunks.append(ChunkReport(chunk.length, max(0, before - chunk.skipped), again))
    return BlendReport(
        tuple(chunks), found.exact_tokens, tuple(found.rows), found.is_exact, found.deviations, computed
    )


def _one_run(ids: torch.Tensor, start: int, scattered: torch.Tensor | None = None) -> TokenBatch:
    """Return tokens of one sequence as a run behind `start` given tokens. scattered: see TokenBatch."""
    length, none = len(ids), np.array([0])
    tree = PrefixTree(np.array([-1]), np.array([start]), np.array([0, length]), none)
    return TokenBatch(ids, np.array([length]), none, tree=tree, scattered=scattered)
