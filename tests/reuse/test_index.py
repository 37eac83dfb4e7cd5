"""Indexes find the brute-force nearest vectors (nearly always in large partitions) and exact distances."""

import errno
import os
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

import faiss
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.maps.index import EXACT_BELOW, FeatureIndex, index_path
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.runtime.files import refused_read


def is_exact(index, length):
    """Whether the partition of a length is searched exactly."""
    return isinstance(index._partitions[length], faiss.IndexFlat)


DIMENSIONS = 40
# float32 has seven digits, and the coordinates here are about 1.
TOLERANCE = 1e-6
# Sizes from which a partition is compressed. Partitions of at least 700 vectors are tested with both values;
# with fewer vectors, Faiss warns that it has too little training data.
EXACT, COMPRESSED = EXACT_BELOW, 700


@pytest.fixture(scope="module", autouse=True)
def batched_distances():
    """Make Faiss compute distances as |a|² + |b|² - 2ab in all batches of two or more, not only in large."""
    threshold = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = 2
    yield
    faiss.cvar.distance_compute_blas_threshold = threshold


def vectors(count: int, seed: int = 0, dimensions: int = DIMENSIONS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dimensions)).astype(np.float32) / dimensions**0.5


def brute_force(stored: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest stored row of each query and the distance, computed in float64."""
    distances = np.linalg.norm(asked[:, None].astype(np.float64) - stored.astype(np.float64), axis=2)
    return distances.argmin(axis=1), distances.min(axis=1)


@pytest.mark.parametrize("exact_below", [EXACT, COMPRESSED])
@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.integers(0, 39), min_size=1, max_size=60))
@example(rows=list(range(40)))
def test_distance_does_not_depend_on_the_batch(exact_below, rows):
    recorded = vectors(700)
    # Queries far from stored vectors, equal to one, and so near one that |a|² + |b|² - 2ab loses all digits.
    queries = np.concatenate([vectors(20, 1), recorded[:10], recorded[10:20] + np.float32(1e-5)])
    index = FeatureIndex()
    index.add(9, recorded, exact_below)
    together, apart = index.nearest(9, queries[rows]), [index.nearest(9, queries[[row]]) for row in rows]
    np.testing.assert_array_equal(together[0], np.concatenate([found for found, _ in apart]))
    np.testing.assert_array_equal(together[1], np.concatenate([distances for _, distances in apart]))
    np.testing.assert_allclose(together[1], brute_force(recorded, queries[rows])[1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("exact_below", [EXACT, COMPRESSED])
@pytest.mark.parametrize("asked", [1, 3, 40])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_do_not_affect_other_queries(exact_below, asked, number):
    recorded, queries = vectors(700), vectors(asked, 1)
    index = FeatureIndex()
    index.add(9, recorded, exact_below)
    found, distances = index.nearest(9, queries)
    queries[asked // 2, 3] = number
    others = np.arange(asked) != asked // 2
    found_beside, distances_beside = index.nearest(9, queries)
    np.testing.assert_array_equal(found_beside[others], found[others])
    np.testing.assert_array_equal(distances_beside[others], distances[others])
    assert not np.isfinite(distances_beside[~others]).any()


@pytest.mark.parametrize("exact_below", [EXACT, COMPRESSED])
@pytest.mark.parametrize("dimensions", [5, 40, 128])
def test_stored_vector_finds_itself_at_distance_zero(exact_below, dimensions):
    recorded = vectors(2000, dimensions=dimensions)
    index = FeatureIndex()
    index.add(9, recorded, exact_below)
    found, distances = index.nearest(9, recorded)
    assert found.tolist() == list(range(2000))
    assert not distances.any()


@settings(max_examples=20, deadline=None)
@given(stored=st.integers(700, 1500), asked=st.integers(1, 40), seed=st.integers(0, 1000))
def test_compressed_search_misses_at_most_one_nearest_vector_and_gives_exact_distances(stored, asked, seed):
    recorded, queries = vectors(stored, seed), vectors(asked, seed + 1)
    index = FeatureIndex()
    index.add(9, recorded, COMPRESSED)
    assert not is_exact(index, 9)
    assert (index.vectors(9), index.is_compressed(9)) == (None, True)
    found, distances = index.nearest(9, queries)
    expected, expected_distances = brute_force(recorded, queries)
    assert (found != expected).sum() <= 1
    to_the_found = np.linalg.norm(queries.astype(np.float64) - recorded[found], axis=1)
    np.testing.assert_allclose(distances, to_the_found, atol=TOLERANCE, rtol=0)
    assert (distances >= expected_distances - TOLERANCE).all()


@pytest.mark.parametrize("width", [None, 0.5, 0.2])
def test_large_partition_finds_at_least_95_percent_of_the_nearest_vectors(width):
    # Random vectors, or clouds of 50 vectors around a centre, like the sentences of a corpus.
    everything = vectors(20500, 5, 128)
    if width:
        centres = vectors(400, 6, 128)
        everything = width * everything + centres[np.random.default_rng(7).integers(0, 400, 20500)]
    recorded, queries = everything[:20000], everything[20000:]
    index = FeatureIndex()
    index.add(9, recorded)
    assert not is_exact(index, 9)
    # |q - r|² without |q|², which is the same for all r.
    expected = ((recorded**2).sum(axis=1) - 2 * queries @ recorded.T).argmin(axis=1)
    assert (index.nearest(9, queries)[0] == expected).mean() >= 0.95


def test_more_equal_vectors_than_are_compared_exactly_are_still_found():
    recorded = np.concatenate([np.zeros((4500, 128), np.float32), np.ones((500, 128), np.float32)])
    index = FeatureIndex()
    index.add(9, recorded)
    found, distances = index.nearest(9, recorded[[0, -1]])
    assert found[0] < 4500 <= found[1]
    assert not distances.any()


def test_small_partition_is_searched_exactly():
    index = FeatureIndex()
    index.add(5, vectors(EXACT_BELOW - 1))
    index.add(6, vectors(EXACT_BELOW))
    assert is_exact(index, 5)
    assert not is_exact(index, 6)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.dictionaries(st.integers(1, 99), st.integers(1, 300), min_size=1, max_size=4),
    asked=st.integers(1, 40),
)
def test_nearest_is_the_brute_force_nearest_of_the_length(sizes, asked):
    index = FeatureIndex()
    for length, size in sizes.items():
        index.add(length, vectors(size, seed=length))
    for length, size in sizes.items():
        assert length in index
        assert index.size(length) == size
        assert not index.is_compressed(length)
        np.testing.assert_array_equal(index.vectors(length), vectors(size, seed=length))
        # Vectors of another length are never found, even if they are nearer.
        queries = vectors(asked, seed=max(sizes))
        found, distances = index.nearest(length, queries)
        expected, expected_distances = brute_force(vectors(size, seed=length), queries)
        assert found.tolist() == expected.tolist()
        np.testing.assert_allclose(distances, expected_distances, atol=TOLERANCE, rtol=0)
    assert 100 not in index
    assert (index.vectors(100), index.is_compressed(100)) == (None, False)


@pytest.mark.parametrize("exact_below", [EXACT, COMPRESSED])
def test_index_without_some_records_finds_the_others_and_leaves_the_index_as_it_is(exact_below):
    stored, index = vectors(COMPRESSED, seed=1), FeatureIndex()
    index.add(5, stored, exact_below)
    found, _ = index.without({5: {0, 7}}).nearest(5, stored)
    assert [row for row, record in enumerate(found.tolist()) if record != row] == [0, 7]
    assert not {0, 7} & set(found.tolist())
    assert index.nearest(5, stored)[0].tolist() == [*range(len(stored))]


@settings(max_examples=20, deadline=None)
@given(
    exact_below=st.sampled_from([EXACT, COMPRESSED]),
    sizes=st.lists(st.integers(COMPRESSED, 1500), min_size=1, max_size=3),
)
def test_index_read_from_disk_gives_the_same_results(exact_below, sizes):
    index, queries = FeatureIndex(), vectors(10, 3)
    for length, size in enumerate(sizes, 5):
        index.add(length, vectors(size, length), exact_below)
    with tempfile.TemporaryDirectory() as folder:
        paths = index.write(Path(folder))
        assert paths == [index_path(Path(folder), length) for length in range(5, 5 + len(sizes))]
        assert sorted(Path(folder).rglob("*.*")) == sorted(paths)
        read = FeatureIndex.read(Path(folder), list(range(5, 5 + len(sizes))))
    for length, size in enumerate(sizes, 5):
        assert read.size(length) == size
        assert is_exact(read, length) is (exact_below == EXACT)
        for written, again in zip(index.nearest(length, queries), read.nearest(length, queries), strict=True):
            np.testing.assert_array_equal(written, again)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "foreign"])
def test_file_that_is_not_an_index_is_refused_by_name(tmp_path, damage):
    index = FeatureIndex()
    index.add(7, vectors(50))
    (path,) = index.write(tmp_path)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"empty": b"", "cut": content[: len(content) // 2], "foreign": b"not faiss" * 9}[damage]
        )
    with pytest.raises(CorruptDatabase, match=r"00007\.faiss"):
        FeatureIndex.read(tmp_path, [7])


# Synthetic records: before and after their index was saved and loaded.

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
def test_nearest_synthetic_record_is_the_brute_force_nearest_in_any_batch(index, length, count, seed):
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
def test_loaded_prototypes_equal_the_written_ones(index):
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


@pytest.fixture
def written(tmp_path):
    """A folder whose name is not UTF-8, as every other name is in a locale without UTF-8, with an index."""
    folder = tmp_path / os.fsdecode(b"\xe9")
    index = FeatureIndex()
    index.add(5, vectors(20))
    assert index.write(folder) == [index_path(folder, 5)]
    return folder


def test_index_is_written_and_read_where_names_of_folders_are_not_utf_8(written):
    index = FeatureIndex.read(written, [5])
    np.testing.assert_array_equal(index.vectors(5), vectors(20))


def test_index_that_the_system_refuses_to_read_is_not_taken_for_a_damaged_one(written, monkeypatch):
    def refuses(path, *_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(Path, "open", refuses)
    with pytest.raises(CorruptDatabase, match=r"00005\.faiss cannot be read") as refusal:
        FeatureIndex.read(written, [5])
    assert refused_read(refusal.value).errno == errno.EMFILE


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
def test_damaged_file_of_prototypes_is_corrupt(tmp_path, content):
    if content is not None:
        prototypes_path(tmp_path).write_bytes(content)
    with pytest.raises(CorruptDatabase, match=r"prototypes\.safetensors cannot be read"):
        PrototypeIndex.load(prototypes_path(tmp_path))
