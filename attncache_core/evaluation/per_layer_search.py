"""AttnCache-f: a search at every layer, so that each layer of a sentence may take another record's maps.

    input of a layer -> its own projector -> its own index, of the exact length -> similarity >= θ?
                     -> hits first         -> maps @ V of the record found, or computed as usual

The variant that the AttnCache papers compare with their single search before the first layer. In the papers
the training label has no length term, so that a record of another length can be found. A map is L x L: here,
as in AttnCache, only records of exactly the sequence's length are searched, and every hit can be served.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attncache_core import Outcome, PrefillResult
from attncache_core.attention_maps.fetch import HitRecords, RecordGroup
from attncache_core.attention_maps.store import AttentionMapStore
from attncache_core.checkpoint import Checkpoint
from attncache_core.devices import Dtype, resolve_dtype
from attncache_core.evaluation.layer_search import LayerSearch, Nearest, nothing_found, train_layer_search
from attncache_core.forward import attention_context
from attncache_core.memory import keep_freed_memory
from attncache_core.models import PackedModel, load_model
from attncache_core.outputs import finite_sequences
from attncache_core.threads import limit_faiss, limit_threads
from attncache_core.tokenizer import TextTokenizer
from attncache_core.tokens import TokenBatch, pack

# The papers' threshold; distances are trained to α = 0.2 times those of the maps, as theirs.
THRESHOLD = 0.99
# A projector for each layer: fewer steps than the one of AttnCache takes.
TRAINING_STEPS = 300
_TOKENS_PER_PASS = 4096

# Length in tokens -> the token sequences of its records, in their order.
Recorded = Mapping[int, Sequence[Sequence[int]]]


@dataclass(frozen=True)
class PerLayerResult(PrefillResult):
    """A sequence is a hit if any of its layers was; similarities are those of the first layer.

    A damaged record counts in `corrupt_records` for each layer and sequence that it would have served.
    """

    layer_hits: np.ndarray  # bool [sequences, layers]

    @property
    def layer_hit_rate(self) -> float:
        """The share of sequences and layers that took their maps from a record."""
        return float(self.layer_hits.mean())


class PerLayerEngine:
    """A model with a search before each of its layers. `run` is for one thread at a time."""

    def __init__(
        self,
        model: PackedModel,
        searches: Mapping[int, LayerSearch],
        store: AttentionMapStore,
        *,
        threshold: float,
        threads: int,
    ) -> None:
        """model: its reused heads are the stored ones. searches: of each layer that has some."""
        self.model = model
        self.searches = searches
        self.store = store
        self.threshold = threshold
        self.threads = threads

    @classmethod
    def train(
        cls,
        checkpoint: Checkpoint,
        store: AttentionMapStore,
        recorded: Recorded,
        *,
        head_order: Sequence[Sequence[int]],
        threshold: float = THRESHOLD,
        steps: int = TRAINING_STEPS,
        dtype: Dtype = "auto",
        threads: int | None = None,
        seed: int = 0,
    ) -> PerLayerEngine:
        """Load the checkpoint, and train a projector and fill an index for each of its layers.

        store: of this checkpoint; every stored head is reused. recorded: for each length the token sequences
        of its first records; other records and lengths serve nobody. head_order: of each layer, as the
        records have it. dtype and threads as PrefillEngine.load has them.
        Raises ValueError if a sequence is not its record's, or no two sequences are of one length.
        """
        _require_recorded(store, recorded)
        keep_freed_memory()
        count = limit_threads(threads)
        model = load_model(
            checkpoint,
            resolve_dtype(dtype),
            prompt_tokens=TextTokenizer(checkpoint).prompt_tokens,
            head_order=head_order,
            reused_heads=store.layout.stored_heads,
        )
        searches = {
            number: train_layer_search(store, number, inputs, steps=steps, seed=seed)
            for number, inputs in enumerate(_layer_inputs(model, recorded))
            if model.layers[number].reused_heads
        }
        return cls(model, searches, store, threshold=threshold, threads=count)

    @torch.inference_mode()
    def run(self, sequences: Sequence[Sequence[int]]) -> PerLayerResult:
        """Run token sequences through the model, with a search before each layer."""
        started = time.perf_counter()
        limit_faiss(self.threads)  # this may be another thread than the one that loaded
        batch = pack(sequences).filled()
        hidden = self.model.embed(batch)
        seen = _Seen(len(sequences), len(self.model.layers))
        for number in range(len(self.model.layers)):
            batch, hidden = self._layer(number, batch, hidden, seen)
        outputs = self.model.outputs(hidden, batch).rows.cpu().numpy()
        return PerLayerResult(
            outputs=batch.in_callers_order(outputs),
            finite=batch.in_callers_order(finite_sequences(batch, hidden, outputs)),
            outcomes=seen.outcomes(),
            similarities=seen.similarities[:, 0],
            tokens=int(batch.offsets[-1]),
            search_seconds=seen.search_seconds,
            forward_seconds=time.perf_counter() - started - seen.search_seconds,
            attention_seconds=seen.attention_seconds,
            corrupt_records=seen.corrupt_records,
            layer_hits=seen.hits,
        )

    def _layer(
        self, number: int, batch: TokenBatch, hidden: torch.Tensor, seen: _Seen
    ) -> tuple[TokenBatch, torch.Tensor]:
        """The batch, with this layer's hits first, and the layer's output [tokens, hidden]."""
        started = time.perf_counter()
        search, layer = self.searches.get(number), self.model.layers[number]
        found = search.nearest(batch, hidden) if search else nothing_found(len(batch.lengths))
        records = self._served(batch, found, seen)
        seen.similarities[batch.order, number] = found.similarities
        seen.hits[batch.order, number] = records >= 0
        searched = time.perf_counter()
        batch, hidden, records = _hits_first(batch, hidden, records)
        groups = [
            RecordGroup(self.store.segments[group.length], records[group.sequences])
            for group in batch.groups(0, int((records >= 0).sum()))
        ]
        with HitRecords(groups) as hits:
            context = attention_context(number, layer, layer.attention_input(hidden), batch, hits)
        seen.search_seconds += searched - started
        seen.attention_seconds += time.perf_counter() - searched
        return batch, layer.finish(hidden, context)

    def _served(self, batch: TokenBatch, found: Nearest, seen: _Seen) -> np.ndarray:
        """The record that serves each sequence, int64 [sequences], -1 for none; no damaged one serves."""
        near = found.similarities >= self.threshold  # nan is not
        records = np.where(near, found.records, -1)
        for group in batch.groups():
            own = records[group.sequences]
            asked = own[own >= 0]
            if len(asked):
                own[own >= 0] = np.where(self.store.segments[group.length].are_sound(asked), asked, -1)
        seen.corrupt_records += int((near & (records < 0)).sum())
        return records


class _Seen:
    """What was seen of a batch on its way through the layers, in the caller's order."""

    def __init__(self, sequences: int, layers: int) -> None:
        self.similarities = np.full((sequences, layers), np.nan, dtype=np.float32)
        self.hits = np.zeros((sequences, layers), dtype=bool)
        self.search_seconds = 0.0
        self.attention_seconds = 0.0
        self.corrupt_records = 0

    def outcomes(self) -> tuple[Outcome, ...]:
        """Of each sequence."""
        return tuple(map(_outcome, self.hits, self.similarities))


def _outcome(hits: np.ndarray, similarities: np.ndarray) -> Outcome:
    """Of one sequence, from what happened in its layers."""
    if hits.any():
        return Outcome.HIT
    return Outcome.NOT_SEARCHED if np.isnan(similarities).all() else Outcome.MISS


def _hits_first(
    batch: TokenBatch, hidden: torch.Tensor, records: np.ndarray
) -> tuple[TokenBatch, torch.Tensor, np.ndarray]:
    """All three with the hits moved to the front, by length; hits of one record become neighbours."""
    permutation = np.lexsort((records, batch.lengths, records < 0))
    if (np.diff(permutation) == 1).all():
        return batch, hidden, records
    batch, index = batch.reordered(permutation)
    return batch, hidden[index], records[permutation]


def _require_recorded(store: AttentionMapStore, recorded: Recorded) -> None:
    """Raise ValueError unless every sequence is that of the record of its number."""
    for length, sequences in recorded.items():
        segment = store.segments.get(length)
        if segment is None or len(sequences) > len(segment):
            raise ValueError(f"the store has no {len(sequences)} records of length {length}")
        for record, ids in enumerate(sequences):
            if not segment.holds_tokens(record, ids):
                raise ValueError(f"record {record} of length {length} was made from another sequence")


def _layer_inputs(model: PackedModel, recorded: Recorded) -> Iterator[dict[int, torch.Tensor]]:
    """For each layer in turn the records' input by length, [records, L, hidden], everything computed."""
    batches = [pack(part) for sequences in recorded.values() for part in _passes(sequences)]
    states = [model.embed(batch) for batch in batches]
    none = HitRecords([])
    for number, layer in enumerate(model.layers):
        parts: dict[int, list[torch.Tensor]] = defaultdict(list)
        for batch, hidden in zip(batches, states, strict=True):
            length = int(batch.lengths[0])
            parts[length].append(hidden.unflatten(0, (-1, length)))
        yield {length: torch.cat(of_length) for length, of_length in parts.items()}
        states = [
            layer.finish(hidden, attention_context(number, layer, layer.attention_input(hidden), batch, none))
            for batch, hidden in zip(batches, states, strict=True)
        ]


def _passes(sequences: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Sequences of one length in runs of at most 4096 tokens (or one sequence)."""
    step = max(1, _TOKENS_PER_PASS // len(sequences[0])) if sequences else 1
    for first in range(0, len(sequences), step):
        yield sequences[first : first + step]
