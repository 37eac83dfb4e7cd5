"""Make the methods that the papers compare, by their names, beside those of `attncache evaluate`.

attncache:moderate       reuse with the θ of a preset (conservative, moderate, aggressive)
attncache-f              the variant of the AttnCache papers with a search before every layer
lazyformer, san          neighbouring layers share attention maps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.evaluation.comparison import Method
from attncache_core.evaluation.methods import METHODS, Methods
from attncache_core.reuse.maps.database import AttentionDatabase
from benchmarks.papers.per_layer_search import train_layerwise_search
from benchmarks.papers.shared_maps import (
    layer_divergences,
    lazyformer_blocks,
    san_blocks,
    shared_maps_engine,
)


class Preset(StrEnum):
    """The papers' thresholds. They keep no budget; 0.99 is a predicted mean map distance of 0.05."""

    CONSERVATIVE = "conservative"
    MODERATE = "moderate"
    AGGRESSIVE = "aggressive"

    @property
    def threshold(self) -> float:
        """The threshold θ of the preset."""
        return {"conservative": 0.995, "moderate": 0.99, "aggressive": 0.95}[self]


PAPER_METHODS = (*METHODS, *(f"attncache:{preset}" for preset in Preset), "attncache-f", "lazyformer", "san")
# These methods give only the output of a sequence, not the log-probabilities of labels of several tokens.
_SINGLE_OUTPUT = ("attncache-f", "lazyformer", "san")
# Number of sequences on which SAN measures how far the maps of neighbouring layers differ.
_SAN_SAMPLE = 200


class PaperMethods(Methods):
    """Makes methods by name, those of the papers too."""

    changing_all = ("lazyformer", "san")

    def __init__(self, *arguments: Any, san_threshold: float | None = None, **options: Any) -> None:
        """Prepare to make methods, as Methods does. corpus: for attncache-f, the recorded sequences.

        san_threshold: Jensen-Shannon divergence in nats below which neighbouring layers share their maps;
        None: the divergence at which half of the layers share maps, as in LazyFormer.
        """
        super().__init__(*arguments, **options)
        self._san_threshold = san_threshold

    def make(self, name: str) -> Method:
        """Make the method with this name.

        Raises InvalidInput if the method needs a database or a corpus that was not given, or if the method
        cannot score labels of several tokens.
        """
        if self._prompt and name in _SINGLE_OUTPUT:
            raise InvalidInput(f"method {name} reads no labels of several tokens", field="methods")
        if name == "lazyformer":
            return self._sharing(lazyformer_blocks(len(self._full.model.layers)))
        if name == "san":
            return self._sharing(self._san_blocks())
        if name == "attncache-f":
            return partial(self._run, self._per_layer(self._opened(name)), True)
        _, _, preset = name.partition(":")
        if not preset:
            return super().make(name)
        database = self._opened(name)
        policy = database.search.policy.with_threshold(Preset(preset).threshold)
        # Refitted weights are measured with the calibrated policy.
        search = replace(database.search, policy=policy)
        return self._reusing(name, replace(database, search=search, refitted=None))

    def _sharing(self, blocks: Sequence[range]) -> Method:
        engine = shared_maps_engine(self._checkpoint, blocks, dtype=self._dtype, threads=self._full.threads)
        return partial(self._run, engine, True)

    def _san_blocks(self) -> list[range]:
        if not self._corpus:
            raise InvalidInput(
                "method san chooses its layers on a sample of texts: give a corpus", field="corpus"
            )
        step = -(-len(self._corpus) // _SAN_SAMPLE)
        divergences = layer_divergences(self._full.model, self._corpus[::step])
        threshold = self._san_threshold
        if threshold is None:
            # As in LazyFormer, half of the layers share maps, rounded down.
            shared = len(self._full.model.layers) // 2
            threshold = float(np.nextafter(np.sort(divergences)[shared - 1], np.inf)) if shared else 0.0
        return san_blocks(divergences, threshold)

    def _per_layer(self, database: AttentionDatabase) -> PrefillEngine:
        store = database.search.store
        recorded: dict[int, dict[int, Sequence[int]]] = {}
        for ids in self._corpus:
            record = store.record_of(ids)
            if record is not None:
                recorded.setdefault(len(ids), {})[record] = ids
        in_order = {
            length: [records[number] for number in sorted(records)]
            for length, records in recorded.items()
            if sorted(records) == list(range(len(records)))
        }
        if not in_order:
            raise InvalidInput(
                "method attncache-f is trained on the texts that the database was built from: give them "
                "as the corpus",
                field="corpus",
            )
        return PrefillEngine.load(
            self._checkpoint,
            strategy=train_layerwise_search(self._full.model, store, in_order, database.mask.order),
            dtype=self._dtype,
            threads=self._full.threads,
        )
