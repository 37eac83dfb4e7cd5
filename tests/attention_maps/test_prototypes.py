"""Prototypes: clusters of what lies together, means of their maps, and the nearest one by brute force."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.attention_maps.prototypes import MeanMaps, PrototypeIndex, clusters, prototypes_path
from attncache_core.attention_maps.store import RecordKind
from attncache_core.errors import CorruptDatabase

DIMENSIONS = 6


def vectors(count: int, seed: int = 0, dimensions: int = DIMENSIONS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dimensions)).astype(np.float32)


@settings(max_examples=50)
@given(count=st.integers(1, 300), most=st.integers(1, 20), seed=st.integers(0, 9))
def test_clusters_are_numbered_without_a_gap_and_no_more_than_asked_for_or_one_for_eight(count, most, seed):
    assigned = clusters(vectors(count, seed), most)
    assert len(assigned) == count
    assert assigned.dtype == np.int64
    numbers = np.unique(assigned)
    assert numbers.tolist() == list(range(len(numbers)))
    assert len(numbers) <= min(most, max(1, count // 8))


@given(count=st.integers(1, 15))
def test_few_sequences_are_one_cluster(count):
    assert clusters(vectors(count), 16).tolist() == [0] * count


def test_equal_sequences_leave_no_cluster_empty():
    assigned = clusters(np.ones((80, DIMENSIONS), np.float32), 8)
    assert np.unique(assigned).tolist() == list(range(assigned.max() + 1))


def test_clusters_are_the_clouds_that_are_there():
    centres = np.repeat(np.eye(4, DIMENSIONS) * 100, 16, axis=0)
    assigned = clusters((centres + vectors(64)).astype(np.float32), 4)
    assert {tuple(assigned[cloud * 16 : cloud * 16 + 16]) for cloud in range(4)} == {
        (cluster,) * 16 for cluster in range(4)
    }


@settings(max_examples=10)
@given(count=st.integers(1, 200), most=st.integers(1, 20))
def test_clusters_are_the_same_each_time(count, most):
    assert clusters(vectors(count), most).tolist() == clusters(vectors(count), most).tolist()


def test_no_sequences_are_in_no_cluster():
    assert clusters(np.empty((0, 1), np.float32), 16).tolist() == []


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 9), st.data())
def test_mean_maps_are_the_mean_of_the_members_of_some_clusters(members, seed, data):
    random = np.random.default_rng(seed)
    layers = [random.random((len(members), heads, 5, 5)).astype(np.float32) for heads in (2, 0, 3)]
    means = MeanMaps()
    for place, cluster in enumerate(members):
        means.add(cluster, [torch.from_numpy(layer[place]) for layer in layers])
    chosen = data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
    for layer, maps in zip(means.of(chosen), layers, strict=True):
        assert layer.dtype == torch.float32
        expected = maps[np.isin(members, chosen)].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(layer, expected, atol=1e-6)


def test_sixteen_bit_maps_are_added_in_float32():
    # 1/2048 is lost beside 1 in bfloat16, and a thousand of them are half of it.
    means = MeanMaps()
    for value in (1.0, *[1 / 2048] * 1024):
        means.add(0, [torch.full((1, 1, 1), value, dtype=torch.bfloat16)])
    (mean,) = means.of([0])
    assert mean.item() == pytest.approx(1.5 / 1025, rel=1e-5)


SYNTHETIC = (RecordKind.PROTOTYPE, RecordKind.MEAN)


@st.composite
def indices(draw):
    """Of some lengths a mean, and a few prototypes or none, numbered behind sentences' records."""
    counts = draw(st.dictionaries(st.integers(1, 9), st.integers(0, 4), max_size=5))
    rows = [
        (length, 10 * length + number, RecordKind.PROTOTYPE if number else RecordKind.MEAN)
        for length in sorted(counts)
        for number in range(1 + counts[length])
    ]
    lengths, records, kinds = (np.array([row[column] for row in rows], dtype=np.int64) for column in range(3))
    return PrototypeIndex(vectors(len(rows), draw(st.integers(0, 99))), lengths, records, kinds)


@given(indices(), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 99))
def test_nearest_record_is_that_of_a_comparison_with_each_of_its_length_and_kind(index, lengths, seed):
    features = vectors(len(lengths), seed + 100)
    for kind in SYNTHETIC:
        records, distances = index.nearest(kind, np.array(lengths), features)
        assert distances.dtype == np.float32
        for row, length in enumerate(lengths):
            alike = np.flatnonzero((index.lengths == length) & (index.kinds == kind))
            if not len(alike):
                assert (records[row], distances[row]) == (-1, np.inf)
                continue
            others = index.features[alike].astype(np.float64)
            true = np.linalg.norm(others - features[row], axis=1)
            assert records[row] == index.records[alike[true.argmin()]]
            assert distances[row] == pytest.approx(true.min(), abs=1e-5)


@given(indices(), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_nearest_record_does_not_depend_on_the_batch(index, lengths):
    features = vectors(len(lengths), seed=5)
    for kind in SYNTHETIC:
        records, distances = index.nearest(kind, np.array(lengths), features)
        for row in range(len(lengths)):
            alone = index.nearest(kind, np.array(lengths[row : row + 1]), features[row : row + 1])
            assert alone[0].tolist() == records[row : row + 1].tolist()
            assert alone[1].tolist() == distances[row : row + 1].tolist()


@given(indices())
def test_a_synthetic_record_finds_itself_at_distance_zero(index):
    for kind in SYNTHETIC:
        own = index.kinds == kind
        records, distances = index.nearest(kind, index.lengths[own], index.features[own])
        assert records.tolist() == index.records[own].tolist()
        assert distances.tolist() == [0.0] * own.sum()


@given(indices())
def test_means_are_one_for_each_length_that_has_synthetic_records(index):
    assert index.means == {length: 10 * length for length in range(1, 10) if length in index.lengths.tolist()}
    assert [length for length in range(1, 10) if length in index] == list(index.means)


@given(indices())
def test_counts_are_those_of_each_length(index):
    assert index.counts() == {length: index.lengths.tolist().count(length) for length in index.lengths}


@given(indices())
def test_index_read_again_is_the_one_that_was_written(index):
    with TemporaryDirectory() as folder:
        prototypes_path(Path(folder)).write_bytes(index.to_bytes())
        again = PrototypeIndex.load(prototypes_path(Path(folder)))
    for name in ("features", "lengths", "records", "kinds"):
        np.testing.assert_array_equal(getattr(again, name), getattr(index, name))
        assert getattr(again, name).dtype == getattr(index, name).dtype


@pytest.mark.parametrize("cut", [0, 7, -1], ids=["empty", "a few bytes", "all but one byte"])
def test_file_that_is_cut_short_is_corrupt(tmp_path, cut):
    index = PrototypeIndex(vectors(3), np.array([5, 5, 6]), np.array([1, 2, 0]), np.array([2, 1, 2]))
    prototypes_path(tmp_path).write_bytes(index.to_bytes()[:cut])
    with pytest.raises(CorruptDatabase, match=r"prototypes\.safetensors cannot be read"):
        PrototypeIndex.load(prototypes_path(tmp_path))


def test_file_of_other_tensors_is_corrupt(tmp_path, tiny_database):
    prototypes_path(tmp_path).write_bytes((tiny_database / "projector.safetensors").read_bytes())
    with pytest.raises(CorruptDatabase):
        PrototypeIndex.load(prototypes_path(tmp_path))


def test_absent_file_is_corrupt(tmp_path):
    with pytest.raises(CorruptDatabase):
        PrototypeIndex.load(prototypes_path(tmp_path))
