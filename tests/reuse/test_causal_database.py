"""Databases of causal models: packed and square maps give the same outputs, and packed maps are smaller."""

from dataclasses import replace

import numpy as np
import pytest
from core_models import COMPUTING, attention_by, prefill
from core_reference import SIXTEEN_BITS
from families import CASES

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.storage.layout import MapForm

pytestmark = pytest.mark.usefixtures("fixed_costs")
EVERYTHING = BuildOptions(heads="all", threshold=0.0, prototypes=2, training_steps=10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "causal"
    return read_checkpoint(CASES["mistral-window-narrow-heads"].written(folder))


@pytest.fixture(scope="module")
def databases(checkpoint, tiny_corpus, tmp_path_factory, fixed_costs):  # noqa: ARG001 - patches the calibration
    """A database with each form of maps; None: a database with the default form."""
    engine, folder = PrefillEngine.load(checkpoint, dtype="float32"), tmp_path_factory.mktemp("databases")
    opened = {}
    for form in (*MapForm, None):
        build_database(engine, tiny_corpus, folder / str(form), replace(EVERYTHING, form=form))
        opened[form] = AttentionDatabase.open(folder / str(form))
    return opened


def embeddings(checkpoint, database, texts):
    engine = PrefillEngine.load(checkpoint, database=database, dtype="float32")
    result = prefill(engine, engine.tokenize(texts), reuse=[database is not None] * len(texts))
    assert all(outcome.is_hit for outcome in result.outcomes) == (database is not None)
    return result.outputs


def test_causal_maps_are_packed_by_default(databases):
    assert databases[None].manifest.form is MapForm.PACKED
    assert databases[MapForm.SQUARE].manifest.form is MapForm.SQUARE
    packed, square = (databases[form].search.store.segments[10] for form in (MapForm.PACKED, MapForm.SQUARE))
    elements = [segment.layout.elements(10) for segment in (packed, square)]
    assert elements[0] == elements[1] * 55 / 100


@pytest.mark.parametrize("computing", COMPUTING)
def test_both_forms_give_the_same_outputs(checkpoint, databases, computing):
    texts = ["my card is lost", "where is my money today", "can you find the new account"]
    with attention_by(computing):
        square, packed = (embeddings(checkpoint, databases[form], texts) for form in MapForm)
    np.testing.assert_allclose(packed, square, atol=1e-5)


@pytest.mark.parametrize("form", MapForm)
def test_recorded_texts_have_the_full_models_outputs(checkpoint, databases, tiny_corpus, form):
    texts = [sentence.text for sentence in tiny_corpus[::20]]
    reused = embeddings(checkpoint, databases[form], texts)
    np.testing.assert_allclose(reused, embeddings(checkpoint, None, texts), atol=SIXTEEN_BITS)


def test_packed_maps_of_a_bidirectional_model_are_refused(tiny_engine, tiny_corpus, tmp_path):
    with pytest.raises(InvalidInput, match="only the maps of causal models") as refused:
        build_database(tiny_engine, tiny_corpus, tmp_path / "a.db", BuildOptions(form=MapForm.PACKED))
    assert refused.value.field == "form"
    assert not (tmp_path / "a.db").exists()
