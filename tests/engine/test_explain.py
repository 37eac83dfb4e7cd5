"""An explanation says what the engine does, and its maps are the maps that Hugging Face computes."""

from dataclasses import replace

import numpy as np
import pytest
from core_decoders import write_llama
from core_models import prefill

from attncache_core import AttentionDatabase, KeyValueOptions, Outcome, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.explain import explain
from attncache_core.reuse.maps.policy import KindPolicy, LengthGroup
from attncache_core.reuse.storage.layout import RecordKind

NOT_RECORDED = "where is my lost card today"


@pytest.fixture(scope="module")
def engine_with(tiny_checkpoint, tiny_database):
    """A function that returns an engine on the tiny database, by θ and the reused heads."""

    def load(threshold, heads="all"):
        database = AttentionDatabase.open(tiny_database, heads=heads, threshold=threshold)
        return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")

    return load


def ids_of(engine, text):
    (ids,) = engine.tokenize([text])
    return ids


def test_recorded_text_is_its_own_nearest_record_and_loses_nothing(engine_with, tiny_corpus):
    engine = engine_with(1.0)
    explained = explain(engine, ids_of(engine, tiny_corpus[0].text))
    assert explained.outcome is Outcome.HIT
    assert explained.chosen.kind is RecordKind.STORED
    assert explained.chosen.similarity == 1
    policy = engine.map_reuse.policy
    assert explained.length_group == policy.names()[policy.group_index(len(explained.ids))]
    assert explained.cosine == pytest.approx(1, abs=1e-4)
    for layer in explained.layers:
        assert np.abs(layer.full[list(layer.reused_heads)] - layer.given).max() < 0.01  # stored in 16 bits


def test_miss_shows_the_nearest_record_that_did_not_serve(engine_with):
    engine = engine_with(1.0)
    explained = explain(engine, ids_of(engine, NOT_RECORDED))
    assert explained.outcome is Outcome.MISS
    assert explained.searched
    assert explained.chosen.similarity < explained.chosen.threshold == 1
    assert explained.layers[0].given is not None
    assert explain(engine, ids_of(engine, NOT_RECORDED), maps=False).layers is None


@pytest.mark.parametrize("heads", ["all", "5"])
def test_cosine_is_that_of_the_outputs_of_the_engine(engine_with, heads):
    engine = engine_with(-100.0, heads)
    ids = ids_of(engine, NOT_RECORDED)
    explained = explain(engine, ids)
    reused, full = (prefill(engine, [ids], reuse=reuse).outputs[0] for reuse in (True, False))
    assert explained.outcome is Outcome.HIT
    cosine = reused @ full / np.linalg.norm(reused) / np.linalg.norm(full)
    assert explained.cosine == pytest.approx(cosine, abs=1e-6)
    assert explained.cosine < 0.9999


@pytest.mark.parametrize("heads", ["all", "layers:1", "5"])
def test_own_maps_are_those_of_hugging_face_and_reused_maps_are_of_the_heads_of_the_mask(
    engine_with, tiny_reference, heads
):
    engine = engine_with(1.0, heads)
    ids = ids_of(engine, NOT_RECORDED)
    explained = explain(engine, ids)
    expected = tiny_reference.maps(ids)
    assert len(explained.layers) * len(explained.layers[0].full) == len(expected)
    for (layer, head), maps in expected.items():
        np.testing.assert_allclose(explained.layers[layer].full[head], maps, atol=1e-5)
    for layer, reused in zip(explained.layers, engine.strategy.mask.as_array(), strict=True):
        assert sorted(layer.reused_heads) == np.flatnonzero(reused).tolist()
        assert len(layer.given) == len(layer.reused_heads)


def test_text_longer_than_the_calibrated_ones_is_compared_although_its_group_is_not(
    tiny_checkpoint, tiny_prototypes_database
):
    database = AttentionDatabase.open(tiny_prototypes_database)
    group = LengthGroup(3, {kind: KindPolicy(1.0) for kind in RecordKind}, searched=False)
    policy = replace(database.search.policy, groups=(group,))
    database = replace(database, search=replace(database.search, policy=policy))
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    explained = explain(engine, ids_of(engine, NOT_RECORDED))
    assert RecordKind.MEAN in {candidate.kind for candidate in explained.candidates}
    assert explained.outcome is Outcome.MISS
    assert explained.searched
    assert explained.chosen == max(explained.candidates, key=lambda candidate: candidate.similarity)
    assert explained.chosen.kind is not RecordKind.MEAN


def test_length_without_records_has_no_nearest_record(engine_with):
    engine = engine_with(0.0)
    explained = explain(engine, ids_of(engine, "my card " * 20))
    assert explained.outcome is Outcome.NOT_SEARCHED
    assert explained.candidates == ()
    assert (explained.chosen, explained.cosine) == (None, None)
    assert all(layer.given is None for layer in explained.layers)


def test_model_without_a_database_explains_its_own_maps_only(tiny_engine):
    explained = explain(tiny_engine, ids_of(tiny_engine, "my card"))
    assert explained.tokens == ("[CLS]", "my", "card", "[SEP]")
    assert (explained.length_group, explained.strangeness, explained.cached_tokens) == (None, None, None)
    np.testing.assert_allclose(explained.layers[0].full.sum(axis=-1), 1, atol=1e-5)


def test_causal_model_counts_stored_tokens_of_the_salt_and_stores_nothing(tmp_path):
    checkpoint = read_checkpoint(write_llama(tmp_path))
    engine = PrefillEngine.load(checkpoint, dtype="float32", key_values=KeyValueOptions(2**22))
    ids = ids_of(engine, "my card is lost and the bank can not send a new card " * 4)
    assert explain(engine, ids, salt=b"a").cached_tokens == 0
    assert explain(engine, ids, salt=b"a").cached_tokens == 0
    engine.run(engine.requests([ids], salt=b"a"))
    explained = explain(engine, ids, salt=b"a")
    assert 0 < explained.cached_tokens <= len(ids)
    assert explain(engine, ids, salt=b"b").cached_tokens == 0
    above = np.triu_indices(len(ids), 1)
    assert not explained.layers[0].full[:, *above].any()
