"""Outputs with attention maps reused: exact for a recorded sequence, with the donor's maps for another.

The oracle computes every sequence alone with Hugging Face's modules and replaces maps head by head with
those that Hugging Face computes for the donor.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import COMPUTING, attention_by, needs_bfloat16, random_sequences, random_text
from core_reference import FLOAT32, SIXTEEN_BITS, rounded
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core import forward
from attncache_core.attention_maps import fetch
from attncache_core.attention_maps.builder import BuildOptions, build_database
from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.fetch import Fetch
from attncache_core.attention_maps.search import Outcome
from attncache_core.corpus import CorpusSentence
from attncache_core.engine import PrefillEngine
from attncache_core.tokens import pack

MASKS = ["all", "layers:0", "layers:1-2", "layers:0,2", "1", "5", "11"]
# Lengths that the tiny database has records of.
RECORDED = range(5, 11)


@pytest.fixture(scope="module")
def engines(tiny_checkpoint, tiny_database):
    """Engines on the tiny database by mask and θ, each loaded once."""
    loaded = {}

    def engine(heads="all", threshold=0.0):
        if (heads, threshold) not in loaded:
            database = AttentionDatabase.open(tiny_database, heads=heads, threshold=threshold)
            loaded[heads, threshold] = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
        return loaded[heads, threshold]

    return engine


@pytest.fixture(scope="module")
def recorded(tiny_engine, tiny_corpus, tiny_database):
    """Length -> the recorded token sequences; record r of a length is the r-th of them."""
    segments = AttentionDatabase.open(tiny_database).search.store.segments
    sequences = {length: [[]] * len(segment) for length, segment in segments.items()}
    for ids in tiny_engine.tokenize([sentence.text for sentence in tiny_corpus]):
        segment = segments[len(ids)]
        (record,) = (row for row in range(len(segment)) if segment.holds_tokens(row, ids))
        sequences[len(ids)][record] = ids
    return sequences


def run(engine, sequences, reuse=True):
    return engine.run(sequences, [reuse] * len(sequences))


def some_of_each(recorded, count=2):
    return [ids for length in RECORDED for ids in recorded[length][:count]]


def donors(engine, sequences, recorded):
    """For each sequence the token ids of the record that serves it, or None."""
    batch = pack(sequences)
    allowed = np.ones(len(sequences), dtype=bool)
    with torch.inference_mode():
        plan = engine.database.search.plan(batch, engine.model.embed(batch), allowed)
    records = batch.in_callers_order(plan.records).tolist()
    return [
        recorded[len(ids)][record] if record >= 0 else None
        for ids, record in zip(sequences, records, strict=True)
    ]


def with_donors(engine, reference, sequences, donors):
    """The oracle's outputs [sequences, hidden], the donor's maps in the mask's heads."""
    mask = engine.database.mask.as_array()
    outputs = []
    for ids, donor in zip(sequences, donors, strict=True):
        maps = rounded(reference.maps(donor)) if donor else {}
        maps = {place: values for place, values in maps.items() if mask[place]}
        outputs.append(reference.hidden_with_maps(ids, maps).mean(dim=0).numpy())
    return np.stack(outputs)


def test_the_oracle_without_donors_is_the_model_itself(engines, tiny_reference):
    sequences = random_sequences([5, 9])
    plain = with_donors(engines(), tiny_reference, sequences, [None, None])
    np.testing.assert_allclose(plain, tiny_reference.means(sequences), atol=FLOAT32)


@pytest.mark.parametrize("heads", MASKS)
def test_a_recorded_sequence_hits_itself_and_gives_the_full_models_output(
    engines, recorded, tiny_reference, heads
):
    sequences = some_of_each(recorded)
    result = run(engines(heads, threshold=1.0), sequences)
    assert result.outcomes == (Outcome.HIT,) * len(sequences)
    assert result.similarities.tolist() == [1.0] * len(sequences)
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=SIXTEEN_BITS)


@pytest.mark.parametrize("heads", MASKS)
def test_a_hit_is_computed_with_its_donors_maps_in_the_masks_heads_and_its_own_in_the_others(
    engines, recorded, tiny_reference, heads
):
    engine = engines(heads)
    sequences = random_sequences([10, 5, 7, 5, 8, 6, 7], seed=1)
    served = donors(engine, sequences, recorded)
    result = run(engine, sequences)
    assert result.outcomes == (Outcome.HIT,) * len(sequences)
    expected = with_donors(engine, tiny_reference, sequences, served)
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)
    # The donors are others than the sequences, and far enough from them to be seen.
    assert abs(expected - tiny_reference.means(sequences)).max() > 10 * SIXTEEN_BITS


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(4, 11), min_size=2, max_size=8), seed=st.integers(0, 99))
def test_a_mixed_batch_gives_each_sequence_what_its_own_outcome_says(
    engines, recorded, tiny_reference, lengths, seed
):
    sequences = random_sequences(lengths, seed)
    similarities = run(engines("7"), sequences).similarities
    # In the middle between two similarities, so that about half of the batch hits.
    known = np.sort(similarities[~np.isnan(similarities)])
    threshold = float(known[len(known) // 2 - 1 : len(known) // 2 + 1].mean()) if len(known) > 1 else 0.5
    engine = at_threshold(engines("7"), threshold)
    result = run(engine, sequences)
    expected_outcomes = tuple(
        Outcome.NOT_SEARCHED
        if length not in RECORDED
        else (Outcome.HIT if similarity >= threshold else Outcome.MISS)
        for length, similarity in zip(lengths, similarities, strict=True)
    )
    assert result.outcomes == expected_outcomes
    expected = with_donors(engine, tiny_reference, sequences, donors(engine, sequences, recorded))
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)


def at_threshold(engine, threshold):
    """The same engine with another θ."""
    search = engine.database.search
    database = replace(
        engine.database, search=replace(search, policy=search.policy.with_threshold(threshold))
    )
    return PrefillEngine(
        engine.checkpoint, engine.model, engine.tokenizer, dtype=engine.dtype, threads=1, database=database
    )


def test_hits_misses_and_the_not_searched_stand_in_one_batch(engines, recorded, tiny_reference):
    unrecorded, new = random_sequences([30, 8], seed=5)
    declined, own = recorded[9][0], recorded[5][1]
    sequences = [unrecorded, declined, new, own]  # longest first: packing turns them round
    result = engines("6", threshold=1.0).run(sequences, [True, False, True, True])
    assert result.outcomes == (Outcome.NOT_SEARCHED, Outcome.NOT_SEARCHED, Outcome.MISS, Outcome.HIT)
    assert np.isnan(result.similarities).tolist() == [True, True, False, False]
    assert result.similarities[3] == 1.0
    expected = tiny_reference.means(sequences)
    np.testing.assert_allclose(result.outputs[:3], expected[:3], atol=FLOAT32)
    np.testing.assert_allclose(result.outputs[3], expected[3], atol=SIXTEEN_BITS)


@pytest.mark.parametrize("heads", MASKS)
def test_a_threshold_above_one_searches_nothing_and_gives_the_full_models_output(
    engines, recorded, tiny_reference, heads
):
    sequences = some_of_each(recorded, 1)
    result = run(engines(heads, threshold=1.001), sequences)
    assert result.outcomes == (Outcome.NOT_SEARCHED,) * len(sequences)
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=FLOAT32)


@settings(max_examples=20)
@given(st.floats(0.7, 1.01), st.floats(0.7, 1.01))
def test_raising_the_threshold_only_removes_hits(engines, recorded, first, second):
    sequences = [*some_of_each(recorded, 1), *random_sequences([5, 6, 7, 8, 9, 10] * 3, seed=2)]
    low, high = (
        np.array(run(at_threshold(engines("4"), threshold), sequences).outcomes) == Outcome.HIT
        for threshold in sorted((first, second))
    )
    assert (high <= low).all()


@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("heads", ["all", "5"])
def test_a_row_of_a_batch_is_the_row_alone_and_order_does_not_matter(engines, recorded, heads, threshold):
    engine = engines(heads, threshold)
    sequences = [*random_sequences([5, 9, 30, 5, 7], seed=3), *some_of_each(recorded, 1)]
    together = run(engine, sequences)
    for place, ids in enumerate(sequences):
        alone = run(engine, [ids])
        assert alone.outcomes == together.outcomes[place : place + 1]
        np.testing.assert_allclose(alone.outputs[0], together.outputs[place], atol=FLOAT32)
        np.testing.assert_allclose(alone.similarities[0], together.similarities[place], atol=FLOAT32)
    permutation = np.random.default_rng(0).permutation(len(sequences))
    permuted = run(engine, [sequences[place] for place in permutation])
    assert permuted.outcomes == tuple(together.outcomes[place] for place in permutation)
    np.testing.assert_allclose(permuted.outputs, together.outputs[permutation], atol=FLOAT32)


def test_declined_reuse_searches_nothing_and_gives_the_full_models_output(engines, recorded, tiny_reference):
    sequences = some_of_each(recorded, 1)
    result = run(engines(), sequences, reuse=False)
    assert result.outcomes == (Outcome.NOT_SEARCHED,) * len(sequences)
    assert np.isnan(result.similarities).all()
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=FLOAT32)


def test_embed_reuses_unless_it_is_told_not_to(engines, tiny_engine):
    texts = ["my new card today", "the old bank is late"]
    full = tiny_engine.embed(texts)
    np.testing.assert_allclose(engines().embed(texts, reuse=False), full, atol=FLOAT32)
    assert abs(engines().embed(texts) - full).max() > 10 * SIXTEEN_BITS


@pytest.fixture(scope="module")
def computed_plainly(engines, recorded, tiny_reference):
    """Sequences that all hit, some of them on one record, and the oracle's outputs by mask."""
    sequences = random_sequences([5, 7, 7, 7, 10, 10], seed=4) + [recorded[8][3]] * 3
    served = donors(engines(), sequences, recorded)
    assert None not in served
    return sequences, {
        heads: with_donors(engines(heads), tiny_reference, sequences, served) for heads in ("all", "5")
    }


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("way", Fetch)
@pytest.mark.parametrize("heads", ["all", "5"])
def test_maps_fetched_in_every_way_give_the_same_values(
    tiny_checkpoint, tiny_database, computed_plainly, heads, way, computing
):
    sequences, expected = computed_plainly
    database = AttentionDatabase.open(tiny_database, heads=heads)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32", fetch=way)
    assert engine.info()["fetch"] == way
    with attention_by(computing):
        result = run(engine, sequences)
    assert result.outcomes == (Outcome.HIT,) * len(sequences)
    np.testing.assert_allclose(result.outputs, expected[heads], atol=SIXTEEN_BITS)
    engine.fetch = Fetch.GATHER
    np.testing.assert_allclose(result.outputs, run(engine, sequences).outputs, atol=FLOAT32)


@pytest.mark.parametrize("way", Fetch)
def test_an_engine_fetches_in_the_way_it_was_told(tiny_checkpoint, tiny_database, recorded, monkeypatch, way):
    database = AttentionDatabase.open(tiny_database)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32", fetch=way)
    ways = []

    class Spied(fetch.HitRecords):
        def __init__(self, groups, way):
            ways.append(way)
            super().__init__(groups, way)

    monkeypatch.setattr(forward, "HitRecords", Spied)
    run(engine, recorded[5][:2])
    assert ways == [way]


def test_long_sequences_are_served_like_short_ones(tiny_engine, tiny_checkpoint, tiny_reference, tmp_path):
    random = np.random.default_rng(0)
    words = 98
    corpus = [CorpusSentence(random_text(random, words), str(number)) for number in range(6)]
    options = BuildOptions(heads="all", threshold=1.0, training_steps=3, max_length=200)
    build_database(tiny_engine, corpus, tmp_path / "long.db", options)
    sequences = tiny_engine.tokenize([sentence.text for sentence in corpus])
    engine = PrefillEngine.load(
        tiny_checkpoint, database=AttentionDatabase.open(tmp_path / "long.db"), dtype="float32"
    )
    result = run(engine, sequences)
    assert result.outcomes == (Outcome.HIT,) * 6
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=SIXTEEN_BITS)


def damage_record(folder, length, record, records, heads=12):
    """Flip one bit of a record's maps; records are the end of the file, each on whole pages of 4096 bytes."""
    path = folder / f"maps/{length:05d}.maps"
    record_bytes = -(-heads * length * length * 2 // 4096) * 4096
    with path.open("r+b") as file:
        file.seek(-(records - record) * record_bytes + 10, 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_record_serves_nobody(tiny_database, tiny_checkpoint, tiny_reference, recorded, tmp_path):
    folder = shutil.copytree(tiny_database, tmp_path / "damaged.db")
    damage_record(folder, length=7, record=3, records=len(recorded[7]))
    database = AttentionDatabase.open(folder, threshold=1.0)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    sequences = [recorded[7][2], recorded[7][3], recorded[7][4], recorded[7][3]]
    for _ in range(2):
        result = run(engine, sequences)
        assert result.outcomes == (Outcome.HIT, Outcome.MISS, Outcome.HIT, Outcome.MISS)
        assert result.corrupt_records == 2
        expected = tiny_reference.means(sequences)
        np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)
        np.testing.assert_allclose(result.outputs[[1, 3]], expected[[1, 3]], atol=FLOAT32)
    assert engine.database.verify() == ["length 7: 1 damaged records, the first is 3"]


@needs_bfloat16
@pytest.mark.parametrize("way", Fetch)
@pytest.mark.parametrize("heads", ["all", "5"])
def test_an_engine_in_bfloat16_uses_records_in_float16(tiny_checkpoint, tiny_database, recorded, heads, way):
    database = AttentionDatabase.open(tiny_database, heads=heads, threshold=1.0)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="bfloat16", fetch=way)
    sequences = some_of_each(recorded, 1)
    hit, full = run(engine, sequences), run(engine, sequences, reuse=False)
    assert hit.outcomes == (Outcome.HIT,) * len(sequences)
    # 8 bits of each activation on both sides: two such runs of this model differ by a few hundredths.
    np.testing.assert_allclose(hit.outputs, full.outputs, atol=0.05)
