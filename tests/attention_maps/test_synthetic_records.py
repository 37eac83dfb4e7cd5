"""Prototypes and means through the engine: who is served by which, and what is computed with it.

The oracle computes every sequence alone with Hugging Face's modules and puts in the maps of the record that
served it, as they lie on disk.
"""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import random_sequences
from core_reference import FLOAT32, SIXTEEN_BITS
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.attention_maps.builder import BuildOptions, build_database
from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.policy import Budget, KindPolicy, LengthGroup, ReusePolicy
from attncache_core.attention_maps.search import Outcome
from attncache_core.attention_maps.store import RecordKind
from attncache_core.engine import PrefillEngine
from attncache_core.outputs import Measure
from attncache_core.tokens import pack

STORED, PROTOTYPE, MEAN = RecordKind
NEVER = KindPolicy(2.0)
ALWAYS = KindPolicy(-100.0)
# Lengths that the corpus has no text of, below its longest.
UNSEEN = 8


@pytest.fixture(scope="module")
def folder(tiny_engine, tiny_corpus, tmp_path_factory):
    """A database of the tiny corpus without its texts of eight tokens: all heads, prototypes and means."""
    folder = tmp_path_factory.mktemp("databases") / "synthetic.db"
    corpus = [sentence for sentence in tiny_corpus if len(tiny_engine.tokenize([sentence.text])[0]) != UNSEEN]
    options = BuildOptions(heads="all", threshold=1.0, prototypes=4, training_steps=20)
    build_database(tiny_engine, corpus, folder, options)
    return folder


@pytest.fixture(scope="module")
def known(tiny_engine, tiny_corpus):
    """A recorded sequence of each length."""
    by_length = {len(ids): ids for ids in tiny_engine.tokenize([each.text for each in tiny_corpus])}
    return [ids for length, ids in sorted(by_length.items()) if length != UNSEEN]


def policy_of(stored=NEVER, prototype=NEVER, mean=NEVER, searched=True) -> ReusePolicy:
    kinds = {STORED: stored, PROTOTYPE: prototype, MEAN: mean}
    return ReusePolicy(Budget(Measure.COSINE, 0.9), (LengthGroup(10, kinds, searched),))


def engine_of(checkpoint, folder, policy: ReusePolicy, heads=None) -> PrefillEngine:
    database = AttentionDatabase.open(folder, heads=heads)
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


def run(engine, sequences):
    return engine.run(sequences, [True] * len(sequences))


def plan(engine, sequences):
    """Records and kinds in the caller's order."""
    batch = pack(sequences)
    with torch.inference_mode():
        found = engine.database.search.plan(
            batch, engine.model.embed(batch), np.ones(len(sequences), dtype=bool)
        )
    return batch.in_callers_order(found.records), batch.in_callers_order(found.kinds)


def expected_outputs(engine, reference, sequences) -> np.ndarray:
    order, outputs = engine.database.mask.order, []
    for ids, record, kind in zip(sequences, *plan(engine, sequences), strict=True):
        maps = {}
        if record >= 0:
            segment = engine.database.search.store.segments[len(ids)]
            assert segment.kinds[record] == kind
            maps = {
                (layer, head): segment.layer_maps(int(record), layer, 4)[place].float()
                for layer, heads in enumerate(order)
                for place, head in enumerate(heads)
            }
        outputs.append(reference.hidden_with_maps(ids, maps).mean(dim=0).numpy())
    return np.stack(outputs)


@pytest.mark.parametrize("name", POLICIES)
def test_outputs_are_those_with_the_maps_of_the_record_that_served(engines, tiny_reference, known, name):
    sequences = [*random_sequences([5, 6, UNSEEN, 9, 10, 5], seed=1), *known]
    result = run(engines[name], sequences)
    expected = expected_outputs(engines[name], tiny_reference, sequences)
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)


@pytest.mark.parametrize("name", ["prototypes", "means", "unsearched"])
def test_hits_of_synthetic_records_are_told_apart(engines, name):
    sequences = random_sequences([5, 6, UNSEEN, 9, 10], seed=2)
    assert run(engines[name], sequences).outcomes == (Outcome.PROTOTYPE_HIT,) * 5
    kind = PROTOTYPE if name == "prototypes" else MEAN
    assert set(plan(engines[name], sequences)[1]) == {kind}


def test_all_kinds_serve_side_by_side(engines):
    sequences = random_sequences([5, 6, 7, 9, 10] * 8, seed=3)
    kinds = Counter(plan(engines["all kinds"], sequences)[1].tolist())
    assert set(kinds) >= {PROTOTYPE, MEAN}
    outcomes = run(engines["all kinds"], sequences).outcomes
    assert outcomes.count(Outcome.HIT) == kinds[STORED]
    assert outcomes.count(Outcome.PROTOTYPE_HIT) == kinds[PROTOTYPE] + kinds[MEAN]


@pytest.mark.parametrize("name", ["all kinds", "unsearched", "recorded only"])
def test_recorded_sequence_is_served_by_its_own_record_and_exact(engines, tiny_reference, known, name):
    result = run(engines[name], known)
    assert result.outcomes == (Outcome.HIT,) * len(known)
    assert result.similarities.tolist() == [1.0] * len(known)
    np.testing.assert_allclose(result.outputs, tiny_reference.means(known), atol=SIXTEEN_BITS)


def test_a_length_without_sentences_is_served_between_the_shortest_and_the_longest(engines):
    engine = engines["prototypes"]
    assert UNSEEN not in engine.database.manifest.records
    sequences = random_sequences([4, UNSEEN, 11], seed=4)
    outcomes = (Outcome.NOT_SEARCHED, Outcome.PROTOTYPE_HIT, Outcome.NOT_SEARCHED)
    assert run(engine, sequences).outcomes == outcomes


def test_where_nothing_is_compared_a_sequence_of_no_record_has_no_similarity(engines, known):
    result = run(engines["unsearched"], [*random_sequences([5, UNSEEN]), known[0]])
    assert np.isnan(result.similarities).tolist() == [True, True, False]


def test_where_only_recorded_sequences_hit_the_others_are_computed_in_full(engines, tiny_reference, known):
    sequences = [*random_sequences([5, 9]), known[1]]
    result = run(engines["recorded only"], sequences)
    assert [outcome.is_hit for outcome in result.outcomes] == [False, False, True]
    np.testing.assert_allclose(result.outputs[:2], tiny_reference.means(sequences[:2]), atol=FLOAT32)


@settings(max_examples=15)
@given(
    st.sampled_from(sorted(POLICIES)), st.lists(st.integers(4, 11), min_size=1, max_size=8), st.integers(0, 9)
)
def test_a_row_of_a_batch_is_the_row_alone(engines, known, name, lengths, seed):
    engine = engines[name]
    sequences = [*random_sequences(lengths, seed), known[seed % len(known)]]
    together = run(engine, sequences)
    for place, ids in enumerate(sequences):
        alone = run(engine, [ids])
        assert alone.outcomes == together.outcomes[place : place + 1]
        np.testing.assert_allclose(alone.outputs[0], together.outputs[place], atol=FLOAT32)
        np.testing.assert_allclose(alone.similarities[0], together.similarities[place], atol=FLOAT32)


@pytest.mark.parametrize("name", ["prototypes", "unsearched"])
def test_declined_sequences_are_computed_in_full_beside_the_others(engines, tiny_reference, name):
    sequences = random_sequences([5, 5, 9], seed=6)
    result = engines[name].run(sequences, [True, False, True])
    hit = Outcome.PROTOTYPE_HIT
    assert result.outcomes == (hit, Outcome.NOT_SEARCHED, hit)
    np.testing.assert_allclose(result.outputs[1], tiny_reference.means(sequences)[1], atol=FLOAT32)


def test_tightening_raises_an_engines_thresholds_until_its_group_is_off(tiny_checkpoint, folder):
    opened = AttentionDatabase.open(folder)
    groups = tuple(LengthGroup(longest, dict.fromkeys(RecordKind, KindPolicy(0.0))) for longest in (6, 10))
    policy = ReusePolicy(Budget(Measure.COSINE, 0.9), groups)
    engine = engine_of(tiny_checkpoint, folder, policy)
    sequences = random_sequences([5, 6, 7, 9] * 5, seed=7)
    short = np.array([len(ids) <= 6 for ids in sequences])
    hits = np.array([outcome.is_hit for outcome in run(engine, sequences).outcomes])
    longer = hits[~short]
    for _ in range(6):
        before = engine.policy
        engine.tighten(0)
        assert engine.policy == before.tightened(0)
        told, expected = engine.info()["database"]["policy"], engine.policy.info()
        for group, own in zip(expected["groups"], engine.policy.groups, strict=True):
            group["reuses"] = not own.is_off
        assert told == expected
        outcomes = np.array(run(engine, sequences).outcomes, dtype=object)
        now = np.array([outcome.is_hit for outcome in outcomes])
        assert (now[short] <= hits[short]).all()
        assert now[~short].tolist() == longer.tolist()
        hits = now
    assert engine.policy.groups[0].tightened == 6
    assert engine.policy.groups[0].is_off
    assert set(outcomes[short]) == {Outcome.NOT_SEARCHED}
    # Only in this engine.
    assert engine.database.search.policy == policy
    assert AttentionDatabase.open(folder).manifest == opened.manifest


def test_tightening_what_was_not_searched_begins_to_search(tiny_checkpoint, folder):
    engine = engine_of(tiny_checkpoint, folder, policy_of(mean=ALWAYS, searched=False))
    sequences = random_sequences([5, 9], seed=8)
    assert np.isnan(run(engine, sequences).similarities).all()
    engine.tighten(0)
    result = run(engine, sequences)
    assert result.outcomes == (Outcome.PROTOTYPE_HIT,) * 2
    assert not np.isnan(result.similarities).any()


def spoil(folder, length, record) -> None:
    """Change one bit of a record's maps; records are the end of the file, each on whole pages."""
    segment = AttentionDatabase.open(folder).search.store.segments[length]
    with segment.path.open("r+b") as file:
        file.seek(segment.records_start + record * segment.layout.record_bytes(length))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["prototypes", "means", "unsearched"])
def test_damaged_synthetic_record_serves_nobody_is_counted_and_found(
    tiny_checkpoint, tiny_reference, folder, engines, tmp_path, known, name
):
    sequences = [*random_sequences([7] * 6, seed=9), *(ids for ids in known if len(ids) == 7)]
    records, _ = plan(engines[name], sequences)
    record = int(records[0])
    victims = (records == record).tolist()
    spoilt = shutil.copytree(folder, tmp_path / "spoilt.db")
    spoil(spoilt, 7, record)
    engine = engine_of(tiny_checkpoint, spoilt, POLICIES[name])
    for _ in range(2):
        result = run(engine, sequences)
        assert result.corrupt_records >= sum(victims)
        assert [not outcome.is_hit for outcome in result.outcomes] == victims
        full = tiny_reference.means(sequences)
        np.testing.assert_allclose(result.outputs[victims], full[victims], atol=FLOAT32)
    assert engine.database.verify() == [f"length 7: 1 damaged records, the first is {record}"]


@pytest.mark.parametrize("name", ["prototypes", "means", "unsearched"])
def test_damaged_record_of_a_declined_sequence_is_not_counted(
    tiny_checkpoint, folder, engines, tmp_path, name
):
    (ids,) = random_sequences([7], seed=9)
    spoilt = shutil.copytree(folder, tmp_path / "spoilt.db")
    spoil(spoilt, 7, int(plan(engines[name], [ids])[0][0]))
    engine = engine_of(tiny_checkpoint, spoilt, POLICIES[name])
    result = engine.run([ids, ids, ids], [True, False, False])
    assert result.corrupt_records == 1


def test_where_nothing_is_compared_the_mean_stands_in_for_a_damaged_record(
    tiny_checkpoint, folder, engines, tmp_path, known
):
    (ids,) = (ids for ids in known if len(ids) == 7)
    spoilt = shutil.copytree(folder, tmp_path / "spoilt.db")
    spoil(spoilt, 7, int(plan(engines["unsearched"], [ids])[0][0]))
    result = run(engine_of(tiny_checkpoint, spoilt, POLICIES["unsearched"]), [ids])
    assert result.outcomes == (Outcome.PROTOTYPE_HIT,)
    assert result.corrupt_records == 1
    closed = run(engine_of(tiny_checkpoint, spoilt, POLICIES["recorded only"]), [ids])
    assert not closed.outcomes[0].is_hit
    assert closed.corrupt_records == 1


def test_info_counts_sentences_and_synthetic_records_apart(folder):
    database = AttentionDatabase.open(folder)
    info = database.info()
    assert info["records"] == 200
    # Of each of six lengths the mean and four prototypes.
    assert info["prototypes"] == 30
    assert database.search.store.records == 230
    assert database.verify() == []
