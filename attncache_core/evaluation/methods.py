"""Make the methods of a comparison by their names.

full                     the model without reuse
attncache                reuse with the policy of the database
attncache:moderate       reuse with the θ of a preset (conservative, moderate, aggressive)
attncache-f              the variant of the AttnCache papers with a search before every layer
lazyformer, san          neighbouring layers share attention maps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest, PrefillResult
from attncache_core.errors import InvalidInput
from attncache_core.evaluation.comparison import FULL, Method
from attncache_core.evaluation.per_layer_search import train_layerwise_search
from attncache_core.evaluation.presets import Preset
from attncache_core.evaluation.shared_maps import (
    layer_divergences,
    lazyformer_blocks,
    san_blocks,
    shared_maps_engine,
)
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.runtime.devices import Dtype
from attncache_core.text.labels import LabelTokens

METHODS = (
    FULL,
    "attncache",
    *(f"attncache:{preset}" for preset in Preset),
    "attncache-f",
    "lazyformer",
    "san",
)
# These methods give only the output of a sequence, not the log-probabilities of labels of several tokens.
_SINGLE_OUTPUT = ("attncache-f", "lazyformer", "san")
# Number of sequences on which SAN measures how far the maps of neighbouring layers differ.
_SAN_SAMPLE = 200


def parse_methods(text: str) -> list[str]:
    """Return the names in a comma-separated list once each, `full` first. Raises InvalidInput if unknown."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METHODS:
            raise InvalidInput(f"methods are {', '.join(METHODS)}; {name!r} is none", field="methods")
    return [FULL, *(name for name in dict.fromkeys(names) if name != FULL)]


class Methods:
    """Makes methods by name, for one checkpoint and, optionally, a database."""

    def __init__(
        self,
        full: PrefillEngine,
        checkpoint: Checkpoint,
        database: AttentionDatabase | None,
        corpus: Sequence[Sequence[int]],
        *,
        dtype: Dtype = "auto",
        san_threshold: float | None = None,
        labels: LabelTokens | None = None,
    ) -> None:
        """Prepare to make methods.

        full: the engine without a database. corpus: token sequences; must contain the recorded sequences for
        attncache-f. labels: labels of several tokens, read from the sequences; None: the outputs suffice.
        san_threshold: Jensen-Shannon divergence in nats below which neighbouring layers share their maps;
        None: the divergence at which half of the layers share maps, as in LazyFormer.
        """
        self._full, self._checkpoint, self._database = full, checkpoint, database
        self._corpus, self._dtype, self._san_threshold = corpus, dtype, san_threshold
        self._prompt = labels.prompt if labels else None
        self.engines: dict[str, PrefillEngine] = {}  # name -> engine of each AttnCache method made so far

    def make(self, name: str) -> Method:
        """Make the method with this name.

        Raises InvalidInput if the method needs a database or a corpus that was not given, or if the method
        cannot score labels of several tokens.
        """
        if name == FULL:
            return partial(self._run, self._full, False)
        if self._prompt and name in _SINGLE_OUTPUT:
            raise InvalidInput(f"method {name} reads no labels of several tokens", field="methods")
        if name == "lazyformer":
            return self._sharing(lazyformer_blocks(len(self._full.model.layers)))
        if name == "san":
            return self._sharing(self._san_blocks())
        database = self._database
        if database is None:
            raise InvalidInput(f"method {name} needs a database", field="database")
        if name == "attncache-f":
            return partial(self._run, self._per_layer(database), True)
        _, _, preset = name.partition(":")
        if preset:
            policy = database.search.policy.with_threshold(Preset(preset).threshold)
            # Refitted weights are measured with the calibrated policy.
            database = replace(database, search=replace(database.search, policy=policy), refitted=None)
        engine = self.engines[name] = self.reusing(database)
        return partial(self._run, engine, True)

    def _run(self, engine: PrefillEngine, reuse: bool, sequences: Sequence[Sequence[int]]) -> PrefillResult:
        requests = [
            PrefillRequest(ids, reuse, self._prompt.sequence_plan(index) if self._prompt else None)
            for index, ids in enumerate(sequences)
        ]
        return engine.run(requests)

    def reusing(self, database: AttentionDatabase) -> PrefillEngine:
        """Load an engine that reuses maps in all length groups, even in those where reuse saves no time."""
        return PrefillEngine.load(
            self._checkpoint, database=database, dtype=self._dtype, threads=self._full.threads
        )

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
