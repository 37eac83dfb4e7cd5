"""Outputs with reuse are exact for recorded sequences, and computed with a donor's maps for others.

The oracle computes every sequence alone with Hugging Face's modules and replaces maps head by head with
those that Hugging Face computes for the donor.
"""

import shutil
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from core_models import (
    COMPUTING,
    attention_by,
    flip,
    needs_bfloat16,
    planned,
    prefill,
    random_sequences,
    random_text,
)
from core_reference import FLOAT32, SIXTEEN_BITS, rounded
from hypothesis import given, settings
from hypothesis import strategies as st
from token_overlap import TokenOverlap

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.corpus import CorpusSentence
from attncache_core.engine import forward, runner
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.plan import Outcome
from attncache_core.text.prompts import SequencePlan
from attncache_core.text.token_batch import pack

MASKS = ["all", "layers:0,2", "1", "5", "11"]
# The lengths with records in the tiny database.
RECORDED = range(5, 11)


@pytest.fixture(scope="module", params=["map reuse", "token overlap"])
def engines(request, tiny_checkpoint, tiny_database, recorded):
    """A function that returns an engine on the tiny database by mask and θ, loaded once, per strategy."""
    loaded = {}

    def engine(heads="all", threshold=0.0):
        if (heads, threshold) not in loaded:
            database = AttentionDatabase.open(tiny_database, heads=heads, threshold=threshold)
            strategy = MapReuse(database)
            if request.param == "token overlap":
                strategy = TokenOverlap(database.search.store, recorded, database.mask, threshold)
            loaded[heads, threshold] = PrefillEngine.load(tiny_checkpoint, strategy=strategy, dtype="float32")
        return loaded[heads, threshold]

    return engine


@pytest.fixture(scope="module")
def recorded(tiny_engine, tiny_corpus, tiny_database):
    """The recorded token sequences of each length, in the order of their records."""
    segments = AttentionDatabase.open(tiny_database).search.store.segments
    sequences = {length: [[]] * len(segment) for length, segment in segments.items()}
    for ids in tiny_engine.tokenize([sentence.text for sentence in tiny_corpus]):
        segment = segments[len(ids)]
        (record,) = (row for row in range(len(segment)) if segment.holds_tokens(row, ids))
        sequences[len(ids)][record] = ids
    return sequences


def some_of_each(recorded, count=2):
    return [ids for length in RECORDED for ids in recorded[length][:count]]


def donors(engine, sequences, recorded):
    """Return for each sequence the token ids of the record that serves the sequence, or None."""
    batch = pack(sequences)
    allowed = np.ones(len(sequences), dtype=bool)
    with torch.inference_mode():
        plan = planned(engine.strategy, batch, engine.model.embed(batch), allowed)
    records = batch.in_callers_order(plan.records).tolist()
    return [
        recorded[len(ids)][record] if record >= 0 else None
        for ids, record in zip(sequences, records, strict=True)
    ]


def with_donors(engine, reference, sequences, donors):
    """Return the oracle's outputs [sequences, hidden], with the donor's maps in the mask's heads."""
    mask = engine.strategy.mask.as_array()
    outputs = []
    for ids, donor in zip(sequences, donors, strict=True):
        maps = rounded(reference.maps(donor)) if donor else {}
        maps = {head: values for head, values in maps.items() if mask[head]}
        outputs.append(reference.hidden_with_maps(ids, maps).mean(dim=0).numpy())
    return np.stack(outputs)


@pytest.mark.parametrize("heads", MASKS)
def test_a_recorded_sequence_hits_itself_and_gives_the_full_models_output(
    engines, recorded, tiny_reference, heads
):
    sequences = some_of_each(recorded)
    result = prefill(engines(heads, threshold=1.0), sequences)
    assert result.outcomes == (Outcome.HIT,) * len(sequences)
    assert result.similarities.tolist() == [1.0] * len(sequences)
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=SIXTEEN_BITS)


@pytest.mark.parametrize("heads", MASKS)
def test_a_hit_is_computed_with_its_donors_maps_in_the_heads_of_the_mask(
    engines, recorded, tiny_reference, heads
):
    engine = engines(heads)
    sequences = random_sequences([10, 5, 7, 5, 8, 6, 7], seed=1)
    served = donors(engine, sequences, recorded)
    result = prefill(engine, sequences)
    assert result.outcomes == (Outcome.HIT,) * len(sequences)
    expected = with_donors(engine, tiny_reference, sequences, served)
    np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)
    # The donors differ enough from the sequences for a wrong map to be noticed.
    assert abs(expected - tiny_reference.means(sequences)).max() > 10 * SIXTEEN_BITS


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(4, 11), min_size=2, max_size=8), seed=st.integers(0, 99))
def test_each_sequence_of_a_mixed_batch_is_computed_by_its_outcome(
    engines, recorded, tiny_reference, lengths, seed
):
    sequences = random_sequences(lengths, seed)
    similarities = prefill(engines("7"), sequences).similarities
    # A θ in the middle between two similarities, so that about half of the batch hits.
    known = np.sort(similarities[~np.isnan(similarities)])
    threshold = float(known[len(known) // 2 - 1 : len(known) // 2 + 1].mean()) if len(known) > 1 else 0.5
    engine = at_threshold(engines("7"), threshold)
    result = prefill(engine, sequences)
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
    """Return the engine with another θ."""
    strategy = engine.strategy
    if isinstance(strategy, MapReuse):
        search = strategy.database.search
        search = replace(search, policy=search.policy.with_threshold(threshold))
        strategy = MapReuse(replace(strategy.database, search=search))
    else:
        strategy = TokenOverlap(strategy.store, strategy.recorded, strategy.mask, threshold)
    return replace(engine, strategy=strategy)


def test_hits_misses_and_not_searched_sequences_in_one_batch(engines, recorded, tiny_reference):
    unrecorded, new = random_sequences([30, 8], seed=5)
    declined, recorded_too = recorded[9][0], recorded[5][1]
    sequences = [unrecorded, declined, new, recorded_too]  # longest first, so that packing reverses the order
    result = prefill(engines("6", threshold=1.0), sequences, reuse=[True, False, True, True])
    assert result.outcomes == (Outcome.NOT_SEARCHED, Outcome.NOT_SEARCHED, Outcome.MISS, Outcome.HIT)
    assert np.isnan(result.similarities).tolist() == [True, True, False, False]
    assert result.similarities[3] == 1.0
    expected = tiny_reference.means(sequences)
    np.testing.assert_allclose(result.outputs[:3], expected[:3], atol=FLOAT32)
    np.testing.assert_allclose(result.outputs[3], expected[3], atol=SIXTEEN_BITS)


def test_a_threshold_above_one_gives_no_search_and_the_full_models_output(engines, recorded, tiny_reference):
    sequences = some_of_each(recorded, 1)
    result = prefill(engines("5", threshold=1.001), sequences)
    assert result.outcomes == (Outcome.NOT_SEARCHED,) * len(sequences)
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=FLOAT32)


def by_one_call(engine, sequences, reuse=True):
    """Run sequences by one call of the compiled stack; skip the test without the stack."""
    if engine.model.compiled_outputs is None:
        pytest.skip("no compiled stack on this processor")
    with mock.patch.object(runner, "forward_pass", side_effect=AssertionError):
        return prefill(engine, sequences, reuse)


@pytest.mark.parametrize("threshold", [0.0, 1.001])
def test_batch_in_which_nothing_can_hit_is_one_compiled_call_like_a_batch_that_declines(
    engines, recorded, threshold
):
    engine = engines("5", threshold)
    unrecorded = random_sequences([30, 11, 4])
    sequences = [*some_of_each(recorded, 1), *unrecorded] if threshold > 1 else unrecorded
    result = by_one_call(engine, sequences)
    assert result.outcomes == (Outcome.NOT_SEARCHED,) * len(sequences)
    declined = by_one_call(engine, sequences, reuse=False)
    assert declined.outcomes == result.outcomes
    np.testing.assert_array_equal(result.outputs, declined.outputs)
    assert np.isnan(result.similarities).all()
    assert np.isnan(declined.similarities).all()


@pytest.mark.parametrize("few", [True, False], ids=["few tokens", "no length pays"])
def test_batch_in_which_reuse_does_not_pay_is_one_compiled_call(
    tiny_checkpoint, tiny_database, recorded, few
):
    database = AttentionDatabase.open(tiny_database, threshold=0.0)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    search = replace(database.search, **({"least_tokens": 99} if few else {"paying": frozenset()}))
    engine = replace(engine, strategy=MapReuse(replace(database, search=search)))
    sequences = [*some_of_each(recorded, 1), *random_sequences([30])]
    result = by_one_call(engine, sequences)
    assert result.outcomes == (*[Outcome.SKIPPED_BY_COST] * len(RECORDED), Outcome.NOT_SEARCHED)
    assert set(prefill(engine, [*sequences, *sequences]).outcomes[: len(RECORDED)]) == {
        Outcome.HIT if few else Outcome.SKIPPED_BY_COST
    }


@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.0])
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(4, 11), max_size=6), seed=st.integers(0, 99))
def test_hits_and_misses_are_one_compiled_call_with_the_bits_of_the_layers(
    engines, recorded, threshold, lengths, seed
):
    engine = engines("5", threshold)
    if engine.model.compiled_outputs is None:
        pytest.skip("no compiled stack on this processor")
    sequences = [*random_sequences(lengths, seed), *recorded[5 + seed % 6][:2]]
    with mock.patch.object(forward, "run_layers", side_effect=AssertionError):
        result = prefill(engine, sequences)
    reading = [SequencePlan(0, states=True)] * len(sequences)  # states are read behind the layers
    by_layers = prefill(engine, sequences, plans=reading)
    assert result.outcomes == by_layers.outcomes
    np.testing.assert_array_equal(result.outputs, by_layers.outputs)
    np.testing.assert_array_equal(result.similarities, by_layers.similarities)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("heads", ["all", "5"])
def test_outputs_do_not_depend_on_the_batch_or_its_order(engines, recorded, heads, threshold):
    engine = engines(heads, threshold)
    sequences = [*random_sequences([5, 9, 30, 5, 7], seed=3), *some_of_each(recorded, 1)]
    together = prefill(engine, sequences)
    for index, ids in enumerate(sequences):
        alone = prefill(engine, [ids])
        assert alone.outcomes == together.outcomes[index : index + 1]
        np.testing.assert_allclose(alone.outputs[0], together.outputs[index], atol=FLOAT32)
        np.testing.assert_allclose(alone.similarities[0], together.similarities[index], atol=FLOAT32)
    permutation = np.random.default_rng(0).permutation(len(sequences))
    permuted = prefill(engine, [sequences[index] for index in permutation])
    assert permuted.outcomes == tuple(together.outcomes[index] for index in permutation)
    np.testing.assert_allclose(permuted.outputs, together.outputs[permutation], atol=FLOAT32)


def test_embed_reuses_by_default(engines, tiny_engine):
    texts = ["my new card today", "the old bank is late"]
    full = tiny_engine.embed(texts)
    np.testing.assert_allclose(engines().embed(texts, reuse=False), full, atol=FLOAT32)
    assert abs(engines().embed(texts) - full).max() > 10 * SIXTEEN_BITS


@pytest.fixture(scope="module")
def computed_plainly(engines, recorded, tiny_reference):
    """Sequences that all hit, some of them the same record, and the oracle's outputs by mask."""
    sequences = random_sequences([5, 7, 7, 7, 10, 10], seed=4) + [recorded[8][3]] * 3
    served = donors(engines(), sequences, recorded)
    assert None not in served
    return sequences, {
        heads: with_donors(engines(heads), tiny_reference, sequences, served) for heads in ("all", "5")
    }


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("heads", ["all", "5"])
def test_compiled_code_and_operators_read_the_same_maps(engines, computed_plainly, heads, computing):
    sequences, expected = computed_plainly
    engine = engines(heads)
    with attention_by(computing):
        result = prefill(engine, sequences)
    assert result.outcomes == (Outcome.HIT,) * len(sequences)
    np.testing.assert_allclose(result.outputs, expected[heads], atol=SIXTEEN_BITS)
    with attention_by("operators"):
        np.testing.assert_allclose(result.outputs, prefill(engine, sequences).outputs, atol=FLOAT32)


def test_long_sequences_hit_like_short_sequences(tiny_engine, tiny_checkpoint, tiny_reference, tmp_path):
    random = np.random.default_rng(0)
    words = 98
    corpus = [CorpusSentence(random_text(random, words), str(number)) for number in range(6)]
    options = BuildOptions(heads="all", threshold=1.0, training_steps=3, max_length=200)
    build_database(tiny_engine, corpus, tmp_path / "long.db", options)
    sequences = tiny_engine.tokenize([sentence.text for sentence in corpus])
    engine = PrefillEngine.load(
        tiny_checkpoint, database=AttentionDatabase.open(tmp_path / "long.db"), dtype="float32"
    )
    result = prefill(engine, sequences)
    assert result.outcomes == (Outcome.HIT,) * 6
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=SIXTEEN_BITS)


def test_a_damaged_record_is_not_used(tiny_database, tiny_checkpoint, tiny_reference, recorded, tmp_path):
    folder = shutil.copytree(tiny_database, tmp_path / "damaged.db")
    segment = AttentionDatabase.open(folder).search.store.segments[7]
    flip(segment.path, segment.records_start + 3 * segment.layout.record_bytes(7) + 10)
    database = AttentionDatabase.open(folder, threshold=1.0)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    sequences = [recorded[7][2], recorded[7][3], recorded[7][4], recorded[7][3]]
    for _ in range(2):
        result = prefill(engine, sequences)
        assert result.outcomes == (Outcome.HIT, Outcome.MISS, Outcome.HIT, Outcome.MISS)
        assert result.report.corrupt_records == 2
        expected = tiny_reference.means(sequences)
        np.testing.assert_allclose(result.outputs, expected, atol=SIXTEEN_BITS)
        np.testing.assert_allclose(result.outputs[[1, 3]], expected[[1, 3]], atol=FLOAT32)
    assert engine.map_reuse.database.verify() == ["length 7: 1 damaged records, the first is 3"]


@needs_bfloat16
@pytest.mark.parametrize("heads", ["all", "5"])
def test_an_engine_in_bfloat16_uses_records_in_float16(tiny_checkpoint, tiny_database, recorded, heads):
    database = AttentionDatabase.open(tiny_database, heads=heads, threshold=1.0)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="bfloat16")
    sequences = some_of_each(recorded, 1)
    hit, full = prefill(engine, sequences), prefill(engine, sequences, reuse=False)
    assert hit.outcomes == (Outcome.HIT,) * len(sequences)
    # Both runs have 8 bits per activation, so their outputs differ by a few hundredths.
    np.testing.assert_allclose(hit.outputs, full.outputs, atol=0.05)
