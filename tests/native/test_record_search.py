"""The compiled search finds the records that a comparison with every record in float64 finds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.native.products import MatrixKind, PackedMatrix
from attncache_core.native.search import NativeSearch, RecordVectors

HIDDEN, TOKEN, LONGEST = 24, 8, 6
# Features are sums of a hundred float32 products.
TOLERANCE = 1e-5


class Layers:
    """A projector with random weights, and what it computes in float64."""

    def __init__(self, dimensions: int) -> None:
        random = torch.Generator().manual_seed(dimensions)
        self.dimensions = dimensions
        self.first = torch.randn(TOKEN, HIDDEN, generator=random) / HIDDEN**0.5
        self.bias = torch.randn(TOKEN, generator=random)
        self.second = torch.randn(dimensions, LONGEST * TOKEN, generator=random) / 16

    def packed(self, library) -> tuple[PackedMatrix, PackedMatrix]:
        first = PackedMatrix(library, MatrixKind.WHOLE, self.first, self.bias)
        return first, PackedMatrix(library, MatrixKind.WHOLE, self.second)

    def features(self, x: torch.Tensor) -> np.ndarray:
        tokens = torch.nn.functional.gelu(x.double() @ self.first.double().T + self.bias.double())
        return (self.second[:, : tokens.numel()].double() @ tokens.flatten()).numpy()


def vectors_of(layers: Layers, length: int, stored: int, prototypes: int) -> RecordVectors:
    """Return random vectors; the last synthetic record is the mean."""
    random = np.random.default_rng(100 * length + stored)
    both = random.normal(size=(stored + prototypes + 1, layers.dimensions)).astype(np.float32)
    kinds = np.array([1] * prototypes + [2])
    return RecordVectors(both[:stored], both[stored:], kinds, 50 + np.arange(prototypes + 1))


def brute_force(of_length: RecordVectors, features: np.ndarray) -> list[tuple[int, float]]:
    """Return record and similarity of the nearest record of each kind."""
    found = []
    for kind in range(3):
        vectors = of_length.stored if kind == 0 else of_length.synthetic[of_length.kinds == kind]
        records = np.arange(len(vectors)) if kind == 0 else of_length.records[of_length.kinds == kind]
        if not len(vectors):
            found.append((-1, -np.inf))
            continue
        distances = np.linalg.norm(vectors.astype(np.float64) - features, axis=1)
        found.append((int(records[distances.argmin()]), 1 - distances.min()))
    return found


def run(search, lengths, dtype=torch.float32):
    """Search for random sequences of these rising lengths: their states, and what was found."""
    hidden = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    ends = np.cumsum(lengths)
    groups = []
    for length in sorted(set(lengths)):
        first, count = lengths.index(length), lengths.count(length)
        groups.append((first, count, int(ends[first] - length), length))
    states = [hidden[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return states, search.nearest(hidden, np.array(groups))


@pytest.mark.parametrize("dimensions", [1, 16, 40, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=20).map(sorted),
    stored=st.integers(0, 40),
    prototypes=st.integers(0, 18),
)
def test_nearest_records_are_those_of_brute_force(kernel, dimensions, dtype, lengths, stored, prototypes):
    layers = Layers(dimensions)
    vectors = {length: vectors_of(layers, length, stored, prototypes) for length in range(2, LONGEST + 1)}
    search = NativeSearch(*layers.packed(kernel.library), vectors)
    states, (features, records, similarities) = run(search, lengths, dtype)
    for row, (length, x) in enumerate(zip(lengths, states, strict=True)):
        expected = layers.features(x)
        np.testing.assert_allclose(features[row], expected, atol=TOLERANCE)
        found = brute_force(vectors[length], expected) if length > 1 else [(-1, -np.inf)] * 3
        for kind, (record, similarity) in enumerate(found):
            assert similarities[kind, row] == pytest.approx(similarity, abs=TOLERANCE)
            assert records[kind, row] == record


@given(lengths=st.lists(st.integers(1, LONGEST), min_size=2, max_size=20).map(sorted))
def test_sequence_finds_in_a_batch_exactly_what_it_finds_alone(kernel, lengths):
    layers = Layers(40)
    vectors = {length: vectors_of(layers, length, 20, 5) for length in range(1, LONGEST + 1)}
    search = NativeSearch(*layers.packed(kernel.library), vectors)
    states, together = run(search, lengths)
    for row, x in enumerate(states):
        alone = search.nearest(x, np.array([(0, 1, 0, len(x))]))
        for found, expected in zip(alone, together, strict=True):
            nearest = expected[row] if expected is together[0] else expected[:, row]
            assert np.array_equal(found.ravel(), nearest)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_features_that_are_not_finite_find_no_record_and_have_no_similarity(kernel, number):
    layers = Layers(40)
    search = NativeSearch(*layers.packed(kernel.library), {3: vectors_of(layers, 3, 20, 5)})
    hidden = torch.zeros(6, HIDDEN)
    hidden[4, 1] = number
    _, records, similarities = search.nearest(hidden, np.array([(0, 2, 0, 3)]))
    assert (records[:, 0] >= 0).all()
    assert np.isfinite(similarities[:, 0]).all()
    assert (records[:, 1] == -1).all()
    assert np.isnan(similarities[:, 1]).all()


def test_sequence_that_is_longer_than_all_records_finds_none_and_than_the_projector_is_refused(kernel):
    layers = Layers(40)
    search = NativeSearch(*layers.packed(kernel.library), {3: vectors_of(layers, 3, 20, 5)})
    hidden = torch.ones(LONGEST + 1, HIDDEN)
    features, records, similarities = search.nearest(hidden, np.array([(0, 1, 0, LONGEST)]))
    assert features[0] == pytest.approx(layers.features(hidden[:LONGEST]), abs=TOLERANCE)
    assert (records == -1).all()
    assert (similarities == -np.inf).all()
    with pytest.raises(IndexError):
        search.nearest(hidden, np.array([(0, 1, 0, LONGEST + 1)]))


def test_only_a_record_of_a_sentence_can_have_similarity_one(kernel):
    layers = Layers(40)
    search = NativeSearch(*layers.packed(kernel.library), {2: vectors_of(layers, 2, 1, 1)})
    features, *_ = search.nearest(torch.ones(2, HIDDEN), np.array([(0, 1, 0, 2)]))
    vectors = RecordVectors(
        *[np.repeat(features, rows, axis=0) for rows in (1, 2)], np.array([1, 2]), np.arange(2)
    )
    same = NativeSearch(*layers.packed(kernel.library), {2: vectors})
    _, _, similarities = same.nearest(torch.ones(2, HIDDEN), np.array([(0, 1, 0, 2)]))
    assert similarities[0, 0] == 1
    assert (similarities[1:, 0] == np.nextafter(np.float32(1), np.float32(0))).all()
