"""The index of synthetic records finds what brute force finds, before and after it was saved and loaded."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.maps.projector import FeatureProjector
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
def test_loaded_index_equals_the_written_index(index):
    with TemporaryDirectory() as folder:
        prototypes_path(Path(folder)).write_bytes(index.to_bytes())
        again = PrototypeIndex.load(prototypes_path(Path(folder)))
    for name in ("features", "lengths", "records", "kinds"):
        np.testing.assert_array_equal(getattr(again, name), getattr(index, name))
        assert getattr(again, name).dtype == getattr(index, name).dtype


@given(indexes())
def test_a_length_has_all_its_records_one_mean_and_each_finds_itself_at_distance_zero(index):
    assert index.means == {length: 10 * length for length in range(1, 10) if length in index.lengths.tolist()}
    for length in range(11):
        of_length = index.lengths == length
        assert (length in index) == of_length.any()
        assert index.counts().get(length, 0) == of_length.sum()
        features, kinds, records = index.of_length(length)
        np.testing.assert_array_equal(features, index.features[of_length])
        np.testing.assert_array_equal(kinds, index.kinds[of_length])
        np.testing.assert_array_equal(records, index.records[of_length])
        for kind in SYNTHETIC if of_length.any() else ():
            found, distances = index.nearest(kind, length, features[kinds == kind])
            assert found.tolist() == records[kinds == kind].tolist()
            assert distances.tolist() == [0.0] * len(found)


def index_with(kind) -> bytes:
    kinds = np.array([2, 1, kind])
    return PrototypeIndex(vectors(3), np.array([5, 5, 6]), np.array([1, 2, 0]), kinds).to_bytes()


@pytest.mark.parametrize(
    "content",
    [
        *(index_with(RecordKind.MEAN)[:cut] for cut in (0, 7, -1)),
        *(index_with(kind) for kind in (-1, RecordKind.STORED, 3)),  # kinds that are not synthetic
        FeatureProjector(4, 4).to_bytes(),  # other tensors
        None,  # no file
    ],
    ids=range(8),
)
def test_damaged_file_is_corrupt(tmp_path, content):
    if content is not None:
        prototypes_path(tmp_path).write_bytes(content)
    with pytest.raises(CorruptDatabase, match=r"prototypes\.safetensors cannot be read"):
        PrototypeIndex.load(prototypes_path(tmp_path))
