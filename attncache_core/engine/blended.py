"""Run one sequence of chunks whose keys and values are given, and compute some tokens again (CacheBlend).

    chunks that are not stored -> computed by themselves, and stored
    layers before the check    -> every token behind the exact beginning
    check layer                -> keys and values of these tokens -> the tokens that deviate most go on
    every later layer          -> the tokens that went on, behind given keys and values; fewer go on

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
from attncache_core.engine.layers import NO_GIVEN_MAPS, run_layers
from attncache_core.engine.request import PrefillRequest, PrefillResult
from attncache_core.engine.targets import log_probabilities
from attncache_core.heads.running import LAST, empty_states
from attncache_core.models import PackedModel
from attncache_core.native.stack import KeyValueSlots
from attncache_core.reuse.blend.chunks import Blend, BlendReport, ChunkReport, Recomputation
from attncache_core.reuse.blend.given import GivenChunks
from attncache_core.reuse.blend.loading import Speeds
from attncache_core.reuse.blend.selection import deviations, picked
from attncache_core.reuse.kv.block_file import DamagedBlock
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.reuse.plan import shared_no_reuse
from attncache_core.text.prefix_tree import PrefixTree
from attncache_core.text.token_batch import TokenBatch


def run_blended(model: PackedModel, store: KeyValueStore, request: PrefillRequest) -> PrefillResult:
    """Run a request with chunks. The outputs read its last token only."""
    started = time.perf_counter()
    blend = request.blend
    assert blend is not None
    cached = [store.givable_tokens(chunk.wanted) for chunk in blend.chunks]
    missing = [
        PrefillRequest(np.frombuffer(chunk.wanted.tokens, dtype="<i4").tolist(), wanted=chunk.wanted)
        for chunk, tokens in zip(blend.chunks, cached, strict=True)
        if tokens < chunk.skipped + chunk.length
    ]
    computed = 0
    if missing:
        computed = run_continued(model, store, missing, [0] * len(missing), ["lasttoken"]).tokens
    found: BlendedPass | None = None
    with (
        suppress(DamagedBlock),
        GivenChunks(store, blend, request.wanted, len(request.ids)) as given,
    ):
        found = BlendedPass(model, store, request.ids, blend, given)
    if found is None:
        with GivenChunks(store, blend, request.wanted, len(request.ids), load=False) as given:
            found = BlendedPass(model, store, request.ids, blend, given)
    return _result(model, request, blend, found, cached, computed, started)


class BlendedPass:
    """One pass over a sequence whose chunks are given."""

    def __init__(
        self, model: PackedModel, store: KeyValueStore, ids: Sequence[int], blend: Blend, given: GivenChunks
    ) -> None:
        """Run all layers. Raises DamagedBlock if what is given is damaged."""
        self._model, self._store, self._given = model, store, given
        self._ids = torch.tensor(ids)
        layout = store.layout
        self._dtype = model.stack.dtype if model.stack else model.dtype
        self._slots = np.zeros((-(-len(ids) // BLOCK_TOKENS) * BLOCK_TOKENS, layout.slot_bytes), np.uint8)
        self.deviations: np.ndarray | None = None
        self.rows: list[int] = []  # that each layer computed
        self.attention_seconds = 0.0
        self.computed = np.zeros(len(ids), dtype=bool)  # the tokens that the check layer computed
        self.exact_tokens = given.exact_tokens
        self._run(blend)
        given.finish()

    def _run(self, blend: Blend) -> None:
        always = self._always_computed(blend)
        # The tokens that are given approximately, as far as they are still computed.
        chosen = np.flatnonzero(self._given.is_given & ~always)
        chosen = chosen[chosen >= self.exact_tokens]
        loaded = self._given.loaded_tokens
        again = _beside_loading(blend.recomputation, self._store, loaded, len(chosen))
        layers = len(self._model.layers)
        counts = again.counts(len(chosen), layers)
        check = min(again.check_layer, layers)
        if not counts[0]:
            chosen = chosen[:0]
        rows = np.sort(np.concatenate([np.flatnonzero(always), chosen]))
        hidden: torch.Tensor | None = None
        for layer, count in enumerate(counts):
            self._given.fill(layer, self._slots)
            if layer == check and count < len(chosen):
                deviation = self._compared(layer, hidden, rows, chosen)
                self.deviations = np.full(len(self._ids), np.nan, dtype=np.float32)
                self.deviations[chosen] = deviation
                chosen = chosen[picked(deviation, count, again.choice)]
                rows, hidden = _kept(rows, hidden, always, chosen)
            before = self._slots[chosen]
            hidden = self._computed(layer, hidden, rows)
            self.rows.append(len(rows))
            if layer <= check:
                self.computed[:] = False
                self.computed[rows] = True
            following = counts[layer + 1] if layer + 1 < layers else len(chosen)
            if layer >= check and following < len(chosen):
                deviation = deviations(before, self._slots[chosen], self._dtype)
                chosen = chosen[picked(deviation, following, again.choice)]
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

    def _computed(self, layer: int, hidden: torch.Tensor | None, rows: np.ndarray) -> torch.Tensor:
        """Run a layer on tokens `rows`, whose slots replace the given ones."""
        addresses = self._slots.__array_interface__["data"][0] + rows * self._slots.shape[1]
        slots = self._key_value_slots(addresses.astype(np.uint64))
        return self._layer(layer, hidden, rows, slots)

    def _compared(
        self, layer: int, hidden: torch.Tensor | None, rows: np.ndarray, chosen: np.ndarray
    ) -> np.ndarray:
        """Return how much the slots of tokens `chosen`, among `rows`, deviate from the given ones."""
        own = np.zeros((len(rows), self._slots.shape[1]), dtype=np.uint8)
        addresses = own.__array_interface__["data"][0] + np.arange(len(rows)) * own.shape[1]
        self._layer(layer, hidden, rows, self._key_value_slots(addresses.astype(np.uint64), only=True))
        return deviations(self._slots[chosen], own[np.searchsorted(rows, chosen)], self._dtype)

    def _layer(
        self, layer: int, hidden: torch.Tensor | None, rows: np.ndarray, slots: KeyValueSlots
    ) -> torch.Tensor:
        batch = self._batch(rows).on(self._model.device)
        found, seconds = run_layers(
            self._model, batch, hidden, NO_GIVEN_MAPS, range(layer, layer + 1), slots=slots
        )
        self.attention_seconds += seconds
        return found

    def _batch(self, rows: np.ndarray) -> TokenBatch:
        one, none = np.array([len(self._ids)]), np.array([0])
        tree = PrefixTree(np.array([-1]), one, np.array([0, len(rows)]), none)
        positions = torch.from_numpy(rows)
        return TokenBatch(self._ids[positions], np.array([len(rows)]), none, tree=tree, scattered=positions)

    def _key_value_slots(self, kept: np.ndarray, *, only: bool = False) -> KeyValueSlots:
        # The slots of one layer are in memory at a time, so every layer finds its slots at the same address.
        first = self._slots.__array_interface__["data"][0]
        block = BLOCK_TOKENS * self._slots.shape[1]
        blocks = first + block * np.arange(len(self._slots) // BLOCK_TOKENS)
        return KeyValueSlots(
            BLOCK_TOKENS,
            0,
            blocks.astype(np.uint64),
            np.array([0, len(blocks)]),
            kept,
            scattered=True,
            only=only,
        )


def _beside_loading(again: Recomputation, store: KeyValueStore, loaded: int, tokens: int) -> Recomputation:
    """Return a recomputation of more tokens, if computing them takes no longer than loading what is given."""
    transfers = store.transfers
    if again.shares or not loaded or transfers is None or not transfers.load_speed * transfers.prefill_speed:
        return again
    speeds = Speeds(store.layout.token_bytes, transfers.load_speed, transfers.prefill_speed)
    return replace(again, ratio=speeds.ratio(again.ratio, loaded, tokens))


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
    assert model.final is not None
    # Every layer computed the tokens behind the chunks, unless they belong to the exact beginning.
    end = max(chunk.first + chunk.length for chunk in blend.chunks)
    first = min(max(end, found.exact_tokens), len(request.ids) - 1)
    states = empty_states(1, model.hidden_size)
    states[0, LAST] = model.final.states(found.hidden[-1:]).cpu().numpy()
    outputs = outputs_of(model, states, np.array([len(request.ids)]), np.zeros(1, np.int64), ["lasttoken"])
    read = _consecutive(request.ids, first)
    of_targets = log_probabilities(model, read, found.hidden[-len(read.ids) :], [request])
    finite = bool(np.isfinite(outputs).all() and torch.isfinite(found.hidden.sum(1)).all())
    if of_targets is not None:
        finite &= bool(np.isfinite(of_targets[0]).all())
    report = _report(blend, found, cached, computed)
    nothing = shared_no_reuse(1)
    return PrefillResult(
        outputs=outputs,
        finite=np.array([finite]),
        outcomes=tuple(nothing.outcomes()),
        similarities=nothing.similarities,
        strangeness=nothing.strangeness,
        tokens=computed + sum(found.rows) // len(found.rows),
        asked_tokens=len(request.ids),
        cached_tokens=np.array([sum(max(0, own.cached - own.recomputed) for own in report.chunks)]),
        search_seconds=0.0,
        forward_seconds=time.perf_counter() - started,
        attention_seconds=found.attention_seconds,
        corrupt_records=0,
        log_probabilities=of_targets,
        blends=[report],
    )


def _report(blend: Blend, found: BlendedPass, cached: Sequence[int], computed: int) -> BlendReport:
    chunks = []
    for chunk, before in zip(blend.chunks, cached, strict=True):
        again = int(found.computed[chunk.first : chunk.first + chunk.length].sum())
        chunks.append(ChunkReport(chunk.length, max(0, before - chunk.skipped), again))
    return BlendReport(tuple(chunks), found.exact_tokens, tuple(found.rows), found.deviations, computed)


def _consecutive(ids: Sequence[int], first: int) -> TokenBatch:
    """Return the tokens of a sequence from `first` on, which follow each other."""
    length, none = len(ids) - first, np.array([0])
    tree = PrefixTree(np.array([-1]), np.array([first]), np.array([0, length]), none)
    return TokenBatch(torch.tensor(ids[first:]), np.array([length]), none, tree=tree)
