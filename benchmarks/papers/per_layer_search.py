"""AttnCache-f: search records before every layer, so that each layer may take the maps of another record.

    input of a layer -> projector of the layer -> index of the layer and length -> similarity >= θ?
                     -> hits first             -> maps of the record found, or computed maps

The AttnCache papers compare this variant with a single search before the first layer. In the papers, the
training label of the variant has no length term, so the search may find a record of another length. A map is
L x L, so the search here is restricted to records of the sequence's length, and every hit can be served.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from attncache_core.calibration.substitution import token_passes
from attncache_core.engine.layers import NO_REUSED_MAPS, run_layers
from attncache_core.models import PackedModel
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import Outcome, ReusePlan, no_reuse, outcome_code, outcomes_of
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.text.token_batch import TokenBatch, pack
from benchmarks.papers.layer_search import LayerSearch, nothing_found, train_layer_search

# The threshold of the papers. As in the papers, features are trained to have α = 0.2 times the map distance.
THRESHOLD = 0.99
# There is a projector per layer, so each is trained with fewer steps than AttnCache's single projector.
TRAINING_STEPS = 300
_TOKENS_PER_PASS = 4096

# Length in tokens -> the token sequences of the records, in the order of the records.
Recorded = Mapping[int, Sequence[Sequence[int]]]


@dataclass(frozen=True)
class LayerwisePlan(ReusePlan):
    """The plan of one layer, and the hits of all layers so far.

    `similarities` are the similarities before the first layer. A damaged record counts in `corrupt_records`
    once per layer and sequence that the record would have served.
    """

    allowed: np.ndarray = field(kw_only=True)  # bool [sequences], whether reuse is allowed
    layer_hits: np.ndarray = field(kw_only=True)  # bool [sequences, layers]
    compared: np.ndarray = field(kw_only=True)  # bool [sequences], whether any layer so far found a record

    def outcomes(self) -> np.ndarray:
        """Return the Outcome of each sequence: a sequence is a hit if any of its layers was."""
        codes = np.where(self.compared, outcome_code(Outcome.MISS), outcome_code(Outcome.NOT_SEARCHED))
        codes[self.layer_hits.any(axis=1)] = outcome_code(Outcome.HIT)
        return outcomes_of(codes)


class LayerwiseSearch(ReuseStrategy):
    """A reuse strategy that searches before each layer, with the projector and the index of the layer."""

    def __init__(
        self,
        searches: Mapping[int, LayerSearch],
        store: AttentionMapStore,
        head_order: Sequence[Sequence[int]],
        threshold: float = THRESHOLD,
    ) -> None:
        """Make the strategy from searches that were trained.

        searches: layer -> search, for each layer with stored heads. head_order: for each layer all its heads,
        in the order in which records store heads. threshold: θ of all layers.
        """
        self.searches, self.store, self.threshold = searches, store, threshold
        self._order = tuple(map(tuple, head_order))
        # Layers of the last batch that took a record's maps, bool [sequences, layers], in the caller's order.
        self.layer_hits = np.zeros((0, len(self._order)), dtype=bool)

    @property
    def mask(self) -> ReuseMask:
        """All stored heads."""
        return ReuseMask(self._order, self.store.layout.stored_heads)

    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> LayerwisePlan:
        """Return a plan that covers no layer, because tokens alone decide nothing; see ReuseStrategy.plan."""
        count, layers = len(batch.lengths), len(self._order)
        nothing = no_reuse(count)
        return LayerwisePlan(
            nothing.records,
            nothing.kinds,
            nothing.similarities,
            nothing.reasons,
            nothing.strangeness,
            self.store.segments,
            until=0,
            allowed=allowed,
            layer_hits=np.zeros((count, layers), dtype=bool),
            compared=np.zeros(count, dtype=bool),
        )

    def refine(self, plan: ReusePlan, batch: TokenBatch, hidden: torch.Tensor) -> LayerwisePlan:
        """Search before layer `plan.until`, and return the plan of this layer; see ReuseStrategy.refine."""
        assert isinstance(plan, LayerwisePlan)
        number, count = plan.until, len(batch.lengths)
        search = self.searches.get(number)
        found = search.nearest(batch, hidden) if search else nothing_found(count)
        near = plan.allowed & (found.similarities >= self.threshold)  # False if the similarity is nan
        records = np.where(near, found.records, -1)
        for group in batch.groups():
            of_group = records[group.sequences]
            hits = of_group[of_group >= 0]
            if len(hits):
                of_group[of_group >= 0] = np.where(plan.segments[group.length].are_sound(hits), hits, -1)
        layer_hits = plan.layer_hits.copy()
        layer_hits[:, number] = records >= 0
        return replace(
            plan,
            records=records,
            similarities=found.similarities if number == 0 else plan.similarities,
            layer_hits=layer_hits,
            compared=plan.compared | ~np.isnan(found.similarities),
            corrupt_records=plan.corrupt_records + int((near & (records < 0)).sum()),
            until=number + 1,
        )

    def commit(self, plan: ReusePlan, batch: TokenBatch) -> None:
        """Keep the hits of each layer in `layer_hits`; see ReuseStrategy.commit."""
        assert isinstance(plan, LayerwisePlan)
        self.layer_hits = batch.in_callers_order(plan.layer_hits)


def train_layerwise_search(
    model: PackedModel,
    store: AttentionMapStore,
    recorded: Recorded,
    head_order: Sequence[Sequence[int]],
    *,
    steps: int = TRAINING_STEPS,
) -> LayerwiseSearch:
    """Train a projector and fill an index for each layer of a model.

    model: the model without a mask. store: records of the same checkpoint; every stored head is reused.
    recorded: for each length, the token sequences of the first records; other records and lengths serve no
    sequence. Raises ValueError if a sequence is not the sequence of its record, or if no two sequences have
    the same length.
    """
    _require_recorded(store, recorded)
    searches = {
        number: train_layer_search(store, number, inputs, steps=steps)
        for number, inputs in enumerate(_layer_inputs(model, recorded))
        if store.layout.stored_heads[number]
    }
    return LayerwiseSearch(searches, store, head_order)


def _require_recorded(store: AttentionMapStore, recorded: Recorded) -> None:
    """Raise ValueError unless sequence i of each length is the sequence of record i."""
    for length, sequences in recorded.items():
        segment = store.segments.get(length)
        if segment is None or len(sequences) > len(segment):
            raise ValueError(f"the store has no {len(sequences)} records of length {length}")
        for record, ids in enumerate(sequences):
            if not segment.holds_tokens(record, ids):
                raise ValueError(f"record {record} of length {length} was made from another sequence")


def _layer_inputs(model: PackedModel, recorded: Recorded) -> Iterator[dict[int, torch.Tensor]]:
    """Yield for each layer its input in the full model: length -> [records, L, hidden]."""
    batches = [
        pack([sequences[index] for index in part])
        for sequences in recorded.values()
        for part in token_passes([len(ids) for ids in sequences], _TOKENS_PER_PASS)
    ]
    with torch.inference_mode():
        states = [model.embed(batch) for batch in batches]
    for number in range(len(model.layers)):
        parts: dict[int, list[torch.Tensor]] = defaultdict(list)
        for batch, hidden in zip(batches, states, strict=True):
            length = int(batch.lengths[0])
            read = model.layers[number].attention_input(hidden)
            parts[length].append(read.unflatten(0, (-1, length)))
        yield {length: torch.cat(of_length) for length, of_length in parts.items()}
        with torch.inference_mode():
            states = [
                run_layers(model, batch, hidden, NO_REUSED_MAPS, range(number, number + 1))[0]
                for batch, hidden in zip(batches, states, strict=True)
            ]
