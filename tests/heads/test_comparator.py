"""Comparison of outputs with reuse to full outputs, by cosine and by agreement."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import cosine
from scipy.special import softmax

from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.heads.vectors import cosines


def comparator(measure, class_logits=None) -> OutputComparator:
    return OutputComparator(measure, class_logits)


@given(arrays(np.int64, (4, 6), elements=st.integers(-50, 50)))
def test_comparable_embeddings_have_unit_length(outputs):
    rows = comparator(Measure.COSINE).comparable(outputs.astype(np.float32))
    # Rows of zeros stay zero.
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), outputs.any(axis=1), atol=1e-5)


@given(arrays(np.float32, (4, 6), elements=st.floats(-50, 50, width=32)))
def test_comparable_class_probabilities_have_unit_length_and_are_never_negative(outputs):
    rows = comparator(Measure.COSINE, lambda outputs: outputs[:, :3]).comparable(outputs)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert rows.shape == (4, 3)
    assert (rows >= 0).all()


def test_cosine_fidelity_of_embeddings_is_scipys_row_by_row():
    left, right = np.random.default_rng(1).normal(size=(2, 7, 5)).astype(np.float32)
    fidelity = comparator(Measure.COSINE).fidelity(left, right)
    expected = [1 - cosine(*pair) for pair in zip(left, right, strict=True)]
    np.testing.assert_allclose(fidelity, expected, atol=1e-6)
    assert fidelity.dtype == np.float64
    left, right = left.astype(np.float64), right.astype(np.float64)
    expected = [1 - cosine(*pair) for pair in zip(left, right, strict=True)]
    np.testing.assert_allclose(cosines(left, right), expected, atol=1e-12)


def test_cosine_fidelity_of_a_row_with_itself_is_at_most_one():
    rows = np.random.default_rng(4).normal(size=(500, 384)).astype(np.float32)
    assert cosines(rows, rows).max() > 1  # rounded up
    fidelity = comparator(Measure.COSINE).fidelity(rows, rows)
    np.testing.assert_allclose(fidelity, 1, atol=1e-6)
    assert fidelity.max() == 1


def test_cosine_fidelity_of_classes_is_the_bhattacharyya_coefficient_of_the_probabilities():
    left, right = np.random.default_rng(2).normal(size=(2, 7, 3)).astype(np.float32) * 3
    fidelity = comparator(Measure.COSINE, lambda outputs: outputs).fidelity(left, right)
    expected = np.sqrt(softmax(left, axis=1) * softmax(right, axis=1)).sum(axis=1)
    np.testing.assert_allclose(fidelity, expected, atol=1e-6)


@given(arrays(np.float32, (2, 8, 3), elements=st.floats(-5, 5, width=32)))
def test_agreement_is_one_where_the_decision_stays_and_zero_where_it_does_not(pair):
    fidelity = comparator(Measure.AGREEMENT, lambda outputs: outputs[:, ::-1]).fidelity(*pair)
    expected = [
        float(max(range(3), key=left[::-1].__getitem__) == max(range(3), key=right[::-1].__getitem__))
        for left, right in zip(*pair, strict=True)
    ]
    assert fidelity.tolist() == expected
