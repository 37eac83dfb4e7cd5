"""Plans that let layers take the maps of earlier layers: any earlier layer, and none that does not fit."""

from dataclasses import replace

import numpy as np
import pytest
from core_models import COMPUTING, attention_by, prefill, random_sequences
from core_reference import FLOAT32

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import no_reuse
from attncache_core.reuse.strategy import ReuseStrategy

LAYERS, HEADS = 3, 4


class Sources(ReuseStrategy):
    """Every plan has these layer sources; all heads of the layers in `shared` are reused."""

    def __init__(self, sources, shared, **changes):
        self.sources, self.shared, self.changes = sources, shared, changes

    @property
    def mask(self):
        reused = tuple(HEADS if layer in self.shared else 0 for layer in range(LAYERS))
        return ReuseMask((tuple(range(HEADS)),) * LAYERS, reused)

    def plan(self, batch, allowed):
        del allowed
        return replace(no_reuse(len(batch.lengths)), layer_sources=self.sources, **self.changes)

    def refine(self, plan, batch, hidden):
        del batch, hidden
        return replace(plan, until=LAYERS)


def engine_of(checkpoint, *strategy, **changes):
    return PrefillEngine.load(checkpoint, strategy=Sources(*strategy, **changes), dtype="float32")


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("sources", [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 0, 2)])
def test_layer_takes_the_maps_of_its_source(tiny_checkpoint, tiny_reference, computing, sources):
    sequences = random_sequences([7, 5, 30, 7])
    shared = {layer for layer, source in enumerate(sources) if source != layer}
    with attention_by(computing):
        outputs = prefill(engine_of(tiny_checkpoint, sources, shared), sequences).outputs
    for found, ids in zip(outputs, sequences, strict=True):
        # Up to the first layer that shares, the maps are the full model's.
        replaced, maps = {}, tiny_reference.maps(ids)
        for layer in range(LAYERS):
            for head in range(HEADS):
                if sources[layer] != layer:
                    replaced[layer, head] = maps[sources[layer], head]
        hidden = tiny_reference.hidden_with_maps(ids, replaced)
        np.testing.assert_allclose(found, hidden.mean(dim=0).numpy(), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize(
    ("sources", "shared", "changes", "message"),
    [
        pytest.param((0, 0), {1}, {}, "sources of 2 layers, the model has 3", id="too few"),
        pytest.param((0, 2, 2), {1}, {}, "layer 1 cannot take the maps of layer 2", id="a later layer"),
        pytest.param(
            (0, 0, 1), {1, 2}, {}, "layer 2 cannot take the maps of layer 1", id="a layer that takes"
        ),
        pytest.param((0, 0, 2), set(), {}, "must hold all heads of layer 1", id="heads outside the mask"),
        pytest.param((0, 1, 2), {1}, {}, "layer 1 cannot take the maps of layer 1", id="nothing given"),
        pytest.param(
            (0, 0, 0), {1, 2}, {"until": 2}, "layer 2 cannot take the maps of layer 0", id="an earlier part"
        ),
        pytest.param(
            (0, 0, 0), {1, 2}, {"records": np.zeros(1, dtype=int)}, "not from both", id="records as well"
        ),
    ],
)
def test_sources_that_do_not_fit_are_refused(tiny_checkpoint, sources, shared, changes, message):
    engine = engine_of(tiny_checkpoint, sources, shared, **changes)
    with pytest.raises(ValueError, match=message):
        prefill(engine, random_sequences([5]))


def test_engine_takes_a_database_or_a_strategy(tiny_checkpoint, tiny_database):
    database = AttentionDatabase.open(tiny_database)
    with pytest.raises(InvalidInput, match="a database or a strategy"):
        PrefillEngine.load(tiny_checkpoint, database=database, strategy=Sources((0, 0, 0), {1, 2}))
