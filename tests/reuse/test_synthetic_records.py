"""Synthetic records (prototypes and means) serve sequences, and outputs are computed with their maps.

The oracle computes every sequence alone with Hugging Face's modules, with the maps on disk of the record that
served the sequence.
"""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import flip, planned, prefill, random_sequences
from core_reference import FLOAT32, SIXTEEN_BITS
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.policy import Budget, KindPolicy, LengthGroup, ReusePolicy
from attncache_core.reuse.plan import Outcome
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.text.token_batch import pack

STORED, PROTOTYPE, MEAN = RecordKind
NEVER = KindPolicy(2.0)
ALWAYS = KindPolicy(-100.0)
# A length without texts in the corpus, between its shortest and its longest text.
UNSEEN = 8


@pytest.fixture(scope="module")
def folder(tiny_engine, tiny_corpus, tmp_path_factory):
    """A database of the tiny corpus without texts of eight tokens: all heads, with prototypes and means."""
    folder = tmp_path_factory.mktemp("databases") / "synthetic.db"
    corpus = [sentence for sentence in tiny_corpus if len(tiny_engine.tokenize([sentence.text])[0]) != UNSEEN]
    options = BuildOptions(heads="all", threshold=1.0, prototypes=4, training_steps=20)
    build_database(tiny_engine, corpus, folder, options)
    return folder


@pytest.fixture(scope="module")
def known(tiny_engine, tiny_corpus):
    """One recorded sequence of each length."""
    by_length = {len(ids): ids for ids in tiny_engine.tokenize([each.text for each in tiny_corpus])}
    return [ids for length, ids in sorted(by_length.items()) if length != UNSEEN]


def policy_of(stored=NEVER, prototype=NEVER, mean=NEVER, searched=True) -> ReusePolicy:
    kinds = {STORED: stored, PROTOTYPE: prototype, MEAN: mean}
    return ReusePolicy(Budget(Measure.COSINE, 0.9), (LengthGroup(10, kinds, searched),))


def engine_of(checkpoint, folder, policy: ReusePolicy) -> PrefillEngine:
    database = AttentionDatabase.open(folder)
    database = replace(database, search=replace(database.search, policy=policy))
    return PrefillEngine.load(checkpoint, database=database, dtype="float32")


POLICIES = {
    "prototypes": policy_of(prototype=ALWAYS),
    "means": policy_of(mean=ALWAYS),
    "unsearched": policy_of(mean=ALWAYS, searched=False),
    "all kinds": policy_of(KindPolicy(0.7), KindPolicy(0.5), ALWAYS),
    "recorded only": policy_of(KindPolicy(1.0), KindPolicy(1.0), NEVER, searched=False),
}


@pytest.fixture(scope="module")
def engines(tiny_checkpoint, folder):
    return {name: engine_of(tiny_checkpoint, folder, policy) for name, policy in POLICIES.items()}


def plan(engine, sequences):
    """Return records and kinds in the caller's order."""
    batch = pack(sequences)
    with torch.inference_mode():
        allowed = np.ones(len(sequences), dtype=bool)
        found = planned(engine.map_reuse.database.search, batch, engine.model.embed(batch), allowed)
    return batch.in_callers_order(found.records), batch.in_callers_order(found.kinds)


def expected_outputs(engine, reference, sequences) -> np.ndarray:
    order, outputs = engine.map_reuse.database.mask.order, []
    for ids, record, kind in zip(sequences, *plan(engine, sequences), strict=True):
        maps = {}
        if record >= 0:
            segment = engine.map_reuse.database.search.store.segments[len(ids)]
            assert segment.kinds[record] == kind
            maps = {
                (layer, head): segment.layer_maps(int(record), layer, 4)[index].float()
                for layer, heads in enumerate(order)
                for index, head in enumerate(heads)
            }
        outputs.append(reference.hidden_with_maps(ids, maps).mean(dim=0).numpy())
    return np.stack(outputs)


@pytest.mark.parametrize("name", POLICIES)
def test_outputs_are_computed_with_the_maps_of_the_record_that_serves(engines, tiny_reference, known, name):
    sequences = [*random_sequences([5, 6, UNSEEN, 9, 10, 5], seed=1), *known]
    result = prefill(engines[name], sequences)
    expected = expected_outputs(engines[name], tiny_reference, sequences)
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)


@pytest.mark.parametrize("name", ["prototypes", "means", "unsearched"])
def test_hits_of_synthetic_records_are_prototype_hits_also_of_a_length_without_texts(engines, name):
    assert UNSEEN not in engines[name].map_reuse.database.manifest.records
    sequences = random_sequences([4, 5, 6, UNSEEN, 9, 10, 11], seed=2)
    shorter, *found, longer = prefill(engines[name], sequences).outcomes
    assert found == [Outcome.PROTOTYPE_HIT] * 5
    assert (shorter, longer) == (Outcome.NOT_SEARCHED,) * 2
    kind = PROTOTYPE if name == "prototypes" else MEAN
    assert set(plan(engines[name], sequences[1:-1])[1]) == {kind}


def test_all_kinds_of_records_serve_in_one_batch(engines):
    sequences = random_sequences([5, 6, 7, 9, 10] * 8, seed=3)
    kinds = Counter(plan(engines["all kinds"], sequences)[1].tolist())
    assert set(kinds) >= {PROTOTYPE, MEAN}
    outcomes = prefill(engines["all kinds"], sequences).outcomes
    assert outcomes.count(Outcome.HIT) == kinds[STORED]
    assert outcomes.count(Outcome.PROTOTYPE_HIT) == kinds[PROTOTYPE] + kinds[MEAN]


@pytest.mark.parametrize("name", ["all kinds", "unsearched", "recorded only"])
def test_recorded_sequence_is_served_by_its_own_record(engines, tiny_reference, known, name):
    others = random_sequences([5, UNSEEN, 9])
    sequences = [*others, *known]
    result, full = prefill(engines[name], sequences), tiny_reference.means(sequences)
    assert result.outcomes[3:] == (Outcome.HIT,) * len(known)
    assert result.similarities[3:].tolist() == [1.0] * len(known)
    np.testing.assert_allclose(result.outputs[3:], full[3:], atol=SIXTEEN_BITS)
    # Without a search, only recorded sequences have a similarity.
    assert np.isnan(result.similarities[:3]).all() == (name != "all kinds")
    if name == "recorded only":
        assert not any(outcome.is_hit for outcome in result.outcomes[:3])
        np.testing.assert_allclose(result.outputs[:3], full[:3], atol=FLOAT32)


def test_record_that_is_left_out_serves_no_sequence_of_a_length_without_a_search(
    tiny_checkpoint, engines, known
):
    database, left_out = engines["unsearched"].map_reuse.database.without(known[:1])
    assert left_out == 1
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    kinds = plan(engine, known)[1].tolist()
    assert (kinds[0], set(kinds[1:])) == (MEAN, {STORED})


@settings(max_examples=15)
@given(
    st.sampled_from(sorted(POLICIES)), st.lists(st.integers(4, 11), min_size=1, max_size=8), st.integers(0, 9)
)
def test_a_row_of_a_batch_is_the_row_alone(engines, known, name, lengths, seed):
    engine = engines[name]
    sequences = [*random_sequences(lengths, seed), known[seed % len(known)]]
    together = prefill(engine, sequences)
    for index, ids in enumerate(sequences):
        alone = prefill(engine, [ids])
        assert alone.outcomes == together.outcomes[index : index + 1]
        np.testing.assert_allclose(alone.outputs[0], together.outputs[index], atol=FLOAT32)
        np.testing.assert_allclose(alone.similarities[0], together.similarities[index], atol=FLOAT32)


@pytest.mark.parametrize("name", ["prototypes", "unsearched"])
def test_declined_sequences_are_computed_in_full_in_a_batch_with_hits(engines, tiny_reference, name):
    sequences = random_sequences([5, 5, 9], seed=6)
    result = prefill(engines[name], sequences, reuse=[True, False, True])
    hit = Outcome.PROTOTYPE_HIT
    assert result.outcomes == (hit, Outcome.NOT_SEARCHED, hit)
    np.testing.assert_allclose(result.outputs[1], tiny_reference.means(sequences)[1], atol=FLOAT32)


def test_first_step_of_a_group_without_a_search_starts_the_search(tiny_checkpoint, folder):
    engine = engine_of(tiny_checkpoint, folder, policy_of(mean=ALWAYS, searched=False))
    sequences = random_sequences([5, 9], seed=8)
    assert np.isnan(prefill(engine, sequences).similarities).all()
    engine.map_reuse.tighten(0)
    result = prefill(engine, sequences)
    assert result.outcomes == (Outcome.PROTOTYPE_HIT,) * 2
    assert not np.isnan(result.similarities).any()


@pytest.fixture
def damage(folder, tmp_path):
    """A function that copies the database, flips a bit of a record of 7 tokens, and returns the copy."""

    def damage_record(record):
        damaged = shutil.copytree(folder, tmp_path / "damaged.db")
        segment = AttentionDatabase.open(damaged).search.store.segments[7]
        flip(segment.path, segment.records_start + int(record) * segment.layout.record_bytes(7))
        return damaged

    return damage_record


@pytest.mark.parametrize("name", ["prototypes", "means", "unsearched"])
def test_damaged_synthetic_record_is_not_used_is_counted_and_found_by_verify(
    tiny_checkpoint, tiny_reference, engines, damage, known, name
):
    sequences = [*random_sequences([7] * 6, seed=9), *(ids for ids in known if len(ids) == 7)]
    records, _ = plan(engines[name], sequences)
    record = int(records[0])
    victims = (records == record).tolist()
    engine = engine_of(tiny_checkpoint, damage(record), POLICIES[name])
    for _ in range(2):
        result = prefill(engine, sequences)
        assert result.report.corrupt_records >= sum(victims)
        assert [not outcome.is_hit for outcome in result.outcomes] == victims
        full = tiny_reference.means(sequences)
        np.testing.assert_allclose(result.outputs[victims], full[victims], atol=FLOAT32)
    assert engine.map_reuse.database.verify() == [f"length 7: 1 damaged records, the first is {record}"]
    # Records of declined sequences are not counted.
    result = prefill(engine, sequences[:1] * 3, reuse=[True, False, False])
    assert result.report.corrupt_records == 1


def test_without_a_search_the_mean_replaces_a_damaged_record(tiny_checkpoint, engines, damage, known):
    (ids,) = (ids for ids in known if len(ids) == 7)
    damaged = damage(plan(engines["unsearched"], [ids])[0][0])
    for name, is_hit in (("unsearched", True), ("recorded only", False)):
        result = prefill(engine_of(tiny_checkpoint, damaged, POLICIES[name]), [ids])
        assert result.outcomes[0].is_hit is is_hit
        assert not is_hit or result.outcomes == (Outcome.PROTOTYPE_HIT,)
        assert result.report.corrupt_records == 1


def test_info_counts_sentences_and_synthetic_records_separately(folder):
    database = AttentionDatabase.open(folder)
    info = database.info()
    assert info.records == 200
    # Each of six lengths has one mean and four prototypes.
    assert info.prototypes == 30
    assert database.search.store.records == 230
    assert database.verify() == []
