"""The methods that can be compared, made by name.

full                     the model, everything computed
attncache                reuse by the database's own policy
attncache:moderate       reuse by a preset's θ (conservative, moderate, aggressive), heads as the policy has
attncache-f              the papers' variant with a search at every layer
lazyformer, san          neighbouring layers share the maps of one sentence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.policy import Preset
from attncache_core.checkpoint import Checkpoint
from attncache_core.devices import Dtype
from attncache_core.engine import PrefillEngine, PrefillResult
from attncache_core.errors import InvalidInput
from attncache_core.evaluation.comparison import FULL, Method
from attncache_core.evaluation.per_layer_search import PerLayerEngine
from attncache_core.evaluation.shared_maps import (
    SharedMapsEngine,
    layer_divergences,
    lazyformer_blocks,
    san_blocks,
)
from attncache_core.labels import LabelTokens

METHODS = (
    FULL,
    "attncache",
    *(f"attncache:{preset}" for preset in Preset),
    "attncache-f",
    "lazyformer",
    "san",
)
# These give a sequence's output and nothing of its other positions.
_SINGLE_OUTPUT = ("attncache-f", "lazyformer", "san")
# Sequences whose maps tell SAN which layers may share.
_SAN_SAMPLE = 200


def parse_methods(text: str) -> list[str]:
    """The names in a list with commas between, `full` first. Raises InvalidInput for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METHODS:
            raise InvalidInput(f"methods are {', '.join(METHODS)}; {name!r} is none", field="methods")
    return [FULL, *(name for name in dict.fromkeys(names) if name != FULL)]


class Methods:
    """Makes methods by name, for one checkpoint and, where it is needed, a database."""

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
        """full: the engine without a database. corpus: token sequences, among them those that are recorded.

        labels: of several tokens, to be read from the sequences; None: the outputs tell all.
        san_threshold: Jensen-Shannon divergence, in nats, under which neighbouring layers share their maps;
        None: the one that makes half of the layers share, as LazyFormer's do.
        """
        self._full, self._checkpoint, self._database = full, checkpoint, database
        self._corpus, self._dtype, self._san_threshold = corpus, dtype, san_threshold
        self._readings = labels.prompt.readings if labels else None
        self.engines: dict[str, PrefillEngine] = {}  # of the methods with a database that were made

    def make(self, name: str) -> Method:
        """The method of this name. Raises InvalidInput where it needs a database or a corpus and has none."""
        if name == FULL:
            return partial(self._run, self._full, False)
        if self._readings and name in _SINGLE_OUTPUT:
            raise InvalidInput(f"method {name} reads no labels of several tokens", field="methods")
        if name == "lazyformer":
            return self._sharing(lazyformer_blocks(len(self._full.model.layers)))
        if name == "san":
            return self._sharing(self._san_blocks())
        database = self._database
        if database is None:
            raise InvalidInput(f"method {name} needs a database", field="database")
        if name == "attncache-f":
            return self._per_layer(database).run
        _, _, preset = name.partition(":")
        if preset:
            policy = database.search.policy.with_threshold(Preset(preset).threshold)
            database = replace(database, search=replace(database.search, policy=policy))
        engine = self.engines[name] = self.reusing(database)
        return partial(self._run, engine, True)

    def _run(self, engine: PrefillEngine, reuse: bool, sequences: Sequence[Sequence[int]]) -> PrefillResult:
        count = len(sequences)
        readings = self._readings and self._readings * (count // len(self._readings))
        return engine.run(sequences, [reuse] * count, readings)

    def reusing(self, database: AttentionDatabase) -> PrefillEngine:
        """An engine with the database that reuses wherever the budget holds, if that saves time or not."""
        return PrefillEngine.load(
            self._checkpoint, database=database, dtype=self._dtype, threads=self._full.threads
        )

    def _sharing(self, blocks: Sequence[range]) -> Method:
        return SharedMapsEngine.load(
            self._checkpoint, blocks, dtype=self._dtype, threads=self._full.threads
        ).run

    def _san_blocks(self) -> list[range]:
        if not self._corpus:
            raise InvalidInput(
                "method san chooses its layers on a sample of texts: give a corpus", field="corpus"
            )
        step = -(-len(self._corpus) // _SAN_SAMPLE)
        divergences = layer_divergences(self._full.model, self._corpus[::step])
        threshold = self._san_threshold
        if threshold is None:
            # As many layers share as with LazyFormer: half of them, the last of an odd number left alone.
            shared = len(self._full.model.layers) // 2
            threshold = float(np.nextafter(np.sort(divergences)[shared - 1], np.inf)) if shared else 0.0
        return san_blocks(divergences, threshold)

    def _per_layer(self, database: AttentionDatabase) -> PerLayerEngine:
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
        return PerLayerEngine.train(
            self._checkpoint,
            store,
            in_order,
            head_order=database.mask.order,
            dtype=self._dtype,
            threads=self._full.threads,
        )
