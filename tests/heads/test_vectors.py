"""Unit length and cosines of output vectors."""

import numpy as np
from scipy.spatial.distance import cosine

from attncache_core.heads.vectors import cosines, normalize


def test_normalised_rows_have_unit_length_and_a_row_of_zeros_stays_zero():
    rows = normalize(np.array([[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]], dtype=np.float32))
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0, 0], [-1, 0]], atol=1e-7)
    assert rows.dtype == np.float32


def test_cosines_are_scipys_row_by_row():
    left, right = np.random.default_rng(0).normal(size=(2, 7, 5))
    expected = [1 - cosine(*pair) for pair in zip(left, right, strict=True)]
    np.testing.assert_allclose(cosines(left, right), expected, atol=1e-12)
