"""The index of synthetic records finds what brute force finds, before and after it was saved and loaded."""

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.reuse.storage.layout import RecordKind

DIMENSIONS = 6


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIMENSIONS)).astype(np.float32)


SYNTHETIC = (RecordKind.PROTOTYPE, RecordKind.MEAN)


@st.composite
def indexes(draw):
    """An index with a mean and up to four prototypes for each of some lengths."""
    counts = draw(st.dictionaries(st.integers(1, 9), st.integers(0, 4), max_size=5))
    rows = [
        (length, 10 * length + number, RecordKind.PROTOTYPE if number else RecordKind.MEAN)
        for length in sorted(counts)
        for number in range(1 + counts[length])
    ]
    lengths, records, kinds = (np.array([row[column] for row in rows], dtype=np.int64) for column in range(3))
    return PrototypeIndex(vectors(len(rows), draw(st.integers(0, 99))), lengths, records, kinds)


@given(indexes(), st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
def test_nearest_record_is_the_brute_force_nearest_in_any_batch(index, length, count, seed):
    features = vectors(count, seed + 100)
    for kind in SYNTHETIC:
        records, distances = index.nearest(kind, length, features)
        assert distances.dtype == np.float32
        alike = np.flatnonzero((index.lengths == length) & (index.kinds == kind))
        for row in range(count):
            if not len(alike):
                assert (records[row], distances[row]) == (-1, np.inf)
                continue
            others = index.features[alike].astype(np.float64)
            true = np.linalg.norm(others - features[row], axis=1)
            assert records[row] == index.records[alike[true.argmin()]]
            assert distances[row] == pytest.approx(true.min(), abs=1e-5)
            alone = index.nearest(kind, length, features[row : row + 1])
            assert (alone[0][0], alone[1][0]) == (records[row], distances[row])


@given(indexes())
def test_a_synthetic_record_finds_itself_at_distance_zero(index):
    for length, kind in product(index.means, SYNTHETIC):
        features, kinds, of_length = index.of_length(length)
        records, distances = index.nearest(kind, length, features[kinds == kind])
        assert records.tolist() == of_length[kinds == kind].tolist()
        assert distances.tolist() == [0.0] * len(records)


@given(indexes())
def test_every_length_with_synthetic_records_has_one_mean(index):
    assert index.means == {length: 10 * length for length in range(1, 10) if length in index.lengths.tolist()}
    assert [length for length in range(1, 10) if length in index] == list(index.means)


@given(indexes(), st.integers(0, 10))
def test_records_of_a_length_are_all_records_of_this_length(index, length):
    of_length = index.lengths == length
    for found, every in zip(
        index.of_length(length), (index.features, index.kinds, index.records), strict=True
    ):
        np.testing.assert_array_equal(found, every[of_length])


@given(indexes())
def test_counts_are_the_numbers_of_records_of_each_length(index):
    assert index.counts() == {length: index.lengths.tolist().count(length) for length in index.lengths}


@given(indexes())
def test_loaded_index_equals_the_written_index(index):
    with TemporaryDirectory() as folder:
        prototypes_path(Path(folder)).write_bytes(index.to_bytes())
        again = PrototypeIndex.load(prototypes_path(Path(folder)))
    for name in ("features", "lengths", "records", "kinds"):
        np.testing.assert_array_equal(getattr(again, name), getattr(index, name))
        assert getattr(again, name).dtype == getattr(index, name).dtype


@pytest.mark.parametrize("cut", [0, 7, -1], ids=["empty", "a few bytes", "all but one byte"])
def test_truncated_file_is_corrupt(tmp_path, cut):
    index = PrototypeIndex(vectors(3), np.array([5, 5, 6]), np.array([1, 2, 0]), np.array([2, 1, 2]))
    prototypes_path(tmp_path).write_bytes(index.to_bytes()[:cut])
    with pytest.raises(CorruptDatabase, match=r"prototypes\.safetensors cannot be read"):
        PrototypeIndex.load(prototypes_path(tmp_path))


def test_missing_file_and_file_with_other_tensors_are_corrupt(tmp_path, tiny_database):
    with pytest.raises(CorruptDatabase):
        PrototypeIndex.load(prototypes_path(tmp_path))
    prototypes_path(tmp_path).write_bytes((tiny_database / "projector.safetensors").read_bytes())
    with pytest.raises(CorruptDatabase):
        PrototypeIndex.load(prototypes_path(tmp_path))


@pytest.mark.parametrize("kind", [-1, RecordKind.STORED, 3])
def test_file_with_a_record_that_is_not_synthetic_is_corrupt(tmp_path, kind):
    index = PrototypeIndex(vectors(2), np.array([5, 5]), np.array([1, 2]), np.array([2, kind]))
    prototypes_path(tmp_path).write_bytes(index.to_bytes())
    with pytest.raises(CorruptDatabase):
        PrototypeIndex.load(prototypes_path(tmp_path))
