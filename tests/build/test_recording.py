"""The records of a database: the maps of each sentence, and the means of these maps."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from core_models import SEAL, random_sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.build.recording import Recording
from attncache_core.build.sentences import FirstInputs, Sentences
from attncache_core.calibration.substitution import collect_maps
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.mask import head_order, natural_rank
from attncache_core.reuse.storage.layout import RecordKind, RecordLayout
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.text.token_batch import pack

# No sentences of 6 and 7 tokens, no training sentences of 9 and 11 tokens, no sentences above 11 tokens.
COUNTS = {4: 3, 5: 40, 8: 20, 9: 2, 10: 6, 11: 2}
HELD_OUT = {5: 4, 8: 3, 9: 2, 11: 2}
LAYOUT = RecordLayout((4, 2, 4), torch.float16)
# The rank differs from the order of the heads, so that a confusion of both is visible.
RANK = np.array([[3, 1, 0, 2], [5, 4, 7, 6], [8, 11, 9, 10]])
# Records keep 11 bits of a map.
SIXTEEN_BITS = 5e-4


def made_sentences(counts=COUNTS, held_out=HELD_OUT, seed=21) -> Sentences:
    """Return sentences with these numbers per length, shuffled across lengths and sides."""
    sequences = random_sequences([length for length, count in counts.items() for _ in range(count)], seed)
    left, sides = Counter(held_out), []
    for ids in sequences:
        sides.append(left[len(ids)] > 0)
        left[len(ids)] -= 1
    order = np.random.default_rng(seed).permutation(len(sequences))
    return Sentences([sequences[index] for index in order], np.array(sides)[order])


@pytest.fixture(scope="module")
def sentences():
    made = made_sentences()
    assert len({tuple(ids) for ids in made.sequences}) == sum(COUNTS.values())
    assert made.held_out.sum() == sum(HELD_OUT.values())
    return made


def recording_of(engine, sentences, prototypes=4, **options) -> Recording:
    inputs = FirstInputs(engine.model, Path(tempfile.gettempdir()))
    return Recording(engine.model, sentences, LAYOUT, prototypes, SEAL, inputs, **options)


@pytest.fixture(scope="module")
def recording(tiny_engine, sentences):
    return recording_of(tiny_engine, sentences)


@pytest.fixture(scope="module")
def store(recording, tmp_path_factory):
    return recording.write(tmp_path_factory.mktemp("recorded"), RANK, lambda *_: None)


def stored_maps(engine, ids) -> list[np.ndarray]:
    """Return, for each layer, the maps that a record of these tokens holds."""
    maps = collect_maps(engine.model, pack([ids]))
    return [
        maps[layer][0][0, list(order[:held])].numpy()
        for layer, (order, held) in enumerate(zip(head_order(RANK), LAYOUT.stored_heads, strict=True))
    ]


def record(store: AttentionMapStore, length: int, number: int) -> list[np.ndarray]:
    return [
        store.segments[length].layer_maps(number, layer, heads).float().numpy()
        for layer, heads in enumerate(LAYOUT.stored_heads)
    ]


def training_sequences(sentences, length) -> list[list[int]]:
    return [
        ids
        for ids, held_out in zip(sentences.sequences, sentences.held_out, strict=True)
        if len(ids) == length and not held_out
    ]


def recorded_sequences(sentences, length) -> list[list[int]]:
    """Return the sequences of a length in the order of their records."""
    training = training_sequences(sentences, length)
    return [*training, *(ids for ids in sentences.sequences if len(ids) == length and ids not in training)]


def test_every_length_has_training_sentences_then_those_held_out_then_prototypes(sentences, recording, store):
    assert recording.lengths == list(store.segments) == list(range(4, 12))
    for length in recording.lengths:
        segment, sequences = store.segments[length], recorded_sequences(sentences, length)
        for number, ids in enumerate(sequences):
            assert segment.holds_tokens(number, ids)
        assert recording.stored(length) == len(sequences) == COUNTS.get(length, 0)
        assert recording.records(length) == len(segment)
        synthetic = len(np.unique(recording.clusters(length)))
        # The mean of all members is first. A single cluster equals the mean and is not recorded again.
        kinds = [2, *[1] * (synthetic if synthetic > 1 else 0)] if synthetic else []
        assert segment.kinds.tolist() == [0] * len(sequences) + kinds


def test_record_of_a_sentence_holds_its_maps_heads_by_rank(tiny_engine, sentences, store):
    for length in COUNTS:
        for number, ids in enumerate(recorded_sequences(sentences, length)[:5]):
            for found, maps in zip(record(store, length, number), stored_maps(tiny_engine, ids), strict=True):
                np.testing.assert_allclose(found, maps, atol=SIXTEEN_BITS)


def members_of(recording, store, length, number) -> list[list[int]]:
    """Return the token sequences that a synthetic record is the mean of."""
    members, assigned = recording.members(length), recording.clusters(length)
    assert len(members) == len(assigned)
    if store.segments[length].kinds[number] == RecordKind.MEAN:
        return members
    cluster = number - recording.stored(length) - 1
    return [members[index] for index in np.flatnonzero(assigned == cluster)]


def synthetic_records(store, length) -> list[int]:
    return np.flatnonzero(store.segments[length].kinds != RecordKind.STORED).tolist()


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8, 9, 10])
def test_synthetic_record_is_the_mean_of_its_members_maps(tiny_engine, recording, store, length):
    numbers = synthetic_records(store, length)
    assert numbers
    for number in numbers:
        maps = [stored_maps(tiny_engine, ids) for ids in members_of(recording, store, length, number)]
        for found, of_layer in zip(record(store, length, number), zip(*maps, strict=True), strict=True):
            np.testing.assert_allclose(found, np.mean(of_layer, axis=0), atol=SIXTEEN_BITS)


def test_each_member_of_a_length_belongs_to_one_prototype(recording, store):
    assert len(synthetic_records(store, 5)) > 2
    for length in recording.lengths:
        mean, *prototypes = synthetic_records(store, length) or [None]
        shared = [ids for number in prototypes for ids in members_of(recording, store, length, number)]
        if prototypes:
            assert sorted(shared) == sorted(members_of(recording, store, length, mean))


def test_members_are_training_sentences_and_longer_sentences_cut_to_the_length(sentences, recording):
    for length in recording.lengths:
        training, members = training_sequences(sentences, length), recording.members(length)
        assert members[: len(training)] == training
        longer = [
            [*ids[: length - 1], ids[-1]]
            for more in range(length + 1, 12)
            for ids in training_sequences(sentences, more)
        ]
        cut = members[len(training) :]
        assert all(ids in longer for ids in cut)
        # The shortest of the longer sentences are taken first.
        assert cut == longer[: len(cut)]


def test_lengths_between_training_and_longer_held_out_sentences_have_no_records(tiny_engine, tmp_path):
    gap = made_sentences({5: 20, 9: 2}, {9: 2})
    recorded = recording_of(tiny_engine, gap)
    assert recorded.lengths == [5, 9]
    store = recorded.write(tmp_path, RANK, lambda *_: None)
    assert [len(segment) for segment in store.segments.values()] == [recorded.records(5), 2]


@settings(max_examples=10)
@given(st.dictionaries(st.integers(3, 9), st.integers(1, 12), min_size=1), st.integers(0, 9))
def test_number_of_records_equals_the_number_written(tiny_engine, tmp_path_factory, counts, seed):
    recorded = recording_of(tiny_engine, made_sentences(counts, {}, seed), prototypes=2)
    seen = []
    folder = tmp_path_factory.mktemp("counted")
    store = recorded.write(folder, natural_rank(3, 4), lambda *step: seen.append(step))
    expected = sum(recorded.records(length) for length in recorded.lengths)
    assert store.records == expected
    assert seen == [(done, expected) for done in range(1, expected + 1)]
    assert all(recorded.is_written(folder, length) for length in recorded.lengths)


def test_without_prototypes_only_sentences_are_recorded(tiny_engine, sentences, tmp_path):
    plain = recording_of(tiny_engine, sentences, prototypes=0)
    store = plain.write(tmp_path, RANK, lambda *_: None)
    assert {length: len(segment) for length, segment in store.segments.items()} == COUNTS
    assert all((segment.kinds == RecordKind.STORED).all() for segment in store.segments.values())
    assert plain.prototype_index(projector(tiny_engine)).counts() == {}


def test_finished_segment_is_not_written_again(tiny_engine, sentences, tmp_path):
    recording_of(tiny_engine, sentences).write(tmp_path, RANK, lambda *_: None)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "maps").iterdir()}
    (tmp_path / "maps/00008.maps").unlink()
    seen = []
    again = recording_of(tiny_engine, sentences)
    again.write(tmp_path, RANK, lambda done, total: seen.append((done, total)))
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "maps").iterdir()}
    assert {name for name in before if after[name] != before[name]} == {"00008.maps"}
    total = sum(again.records(length) for length in again.lengths)
    assert len(seen) == again.records(8)
    assert {step[1] for step in seen} == {total}


def projector(engine) -> FeatureProjector:
    torch.manual_seed(3)
    return FeatureProjector(engine.model.hidden_size, 12).requires_grad_(False)


def features_of(engine, network, ids) -> np.ndarray:
    batch = pack([ids])
    with torch.inference_mode():
        return network(engine.model.embed(batch)[None])[0].numpy()


def test_features_are_those_of_each_sentence_in_the_order_of_the_records(tiny_engine, sentences, recording):
    network = projector(tiny_engine)
    features = recording.features(network)
    assert list(features) == sorted(COUNTS)
    for length, rows in features.items():
        expected = [features_of(tiny_engine, network, ids) for ids in recorded_sequences(sentences, length)]
        np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_index_knows_every_synthetic_record_and_its_kind_and_as_its_feature_the_mean_of_its_members(
    tiny_engine, recording, store
):
    network = projector(tiny_engine)
    index = recording.prototype_index(network)
    assert index.lengths.tolist() == sorted(index.lengths)
    listed = zip(index.lengths.tolist(), index.records.tolist(), index.kinds.tolist(), strict=True)
    assert set(listed) == {
        (length, number, int(segment.kinds[number]))
        for length, segment in store.segments.items()
        for number in synthetic_records(store, length)
    }
    assert 11 not in index
    for row, (length, number) in enumerate(zip(index.lengths, index.records, strict=True)):
        members = members_of(recording, store, int(length), int(number))
        expected = np.mean([features_of(tiny_engine, network, ids) for ids in members], axis=0)
        np.testing.assert_allclose(index.features[row], expected, atol=1e-5)


def test_segments_of_synthetic_records_hold_the_records_that_were_written_with_the_sentences(
    tiny_engine, sentences, tmp_path
):
    alone = recording_of(tiny_engine, sentences, synthetic_only=True)
    recorded = alone.write(tmp_path / "recorded", RANK, lambda *_: None)
    store = alone.write_synthetic(recorded, tmp_path)
    # Lengths 9 to 11 have fewer than eight members.
    assert list(store.segments) == [4, 5, 6, 7, 8]
    index = alone.prototype_index(projector(tiny_engine))
    assert index.counts() == {length: len(segment) for length, segment in store.segments.items()}
    for length, number, kind in zip(index.lengths, index.records, index.kinds, strict=True):
        assert store.segments[length].kinds[number] == kind
        pairs = zip(
            record(store, length, number),
            record(recorded, length, alone.stored(length) + number),
            strict=True,
        )
        assert all(np.array_equal(one, other) for one, other in pairs)


def test_length_without_sentences_and_with_too_few_longer_ones_has_no_segment(tiny_engine, tmp_path):
    few = made_sentences({5: 20, 9: 2}, {})
    alone = recording_of(tiny_engine, few, synthetic_only=True)
    assert list(alone.write(tmp_path, RANK, lambda *_: None).segments) == alone.lengths == [5, 9]
