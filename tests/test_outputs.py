"""Pooling against plain loops, and the arithmetic of vectors and scores."""

import numpy as np
import pytest
import torch
from core_models import random_sequences
from core_reference import FLOAT32
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import cosine
from scipy.special import softmax

from attncache_core.checkpoint import Pooling
from attncache_core.outputs import Judge, Measure, class_scores, cosines, normalize, pool
from attncache_core.tokens import pack

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pooled_plainly(vectors, mode, skipped):
    """One vector from token vectors [L, hidden], after the definition of each mode."""
    kept = range(skipped, len(vectors))
    match mode:
        case "cls":
            return vectors[skipped]
        case "lasttoken":
            return vectors[-1]
        case "max":
            return np.array([max(vectors[place, d] for place in kept) for d in range(vectors.shape[1])])
        case "mean":
            return sum(vectors[place] for place in kept) / len(kept)
        case "mean_sqrt_len_tokens":
            return sum(vectors[place] for place in kept) / len(kept) ** 0.5
        case "weightedmean":
            # A token weighs as much as its position, counted from one.
            total = sum(place + 1 for place in kept)
            return sum((place + 1) * vectors[place] for place in kept) / total
    raise AssertionError(mode)


@pytest.mark.parametrize("skipped", [0, 3], ids=["whole", "without-prompt"])
@pytest.mark.parametrize("mode", MODES)
@given(lengths=st.lists(st.integers(4, 30), min_size=1, max_size=6))
def test_pooling_of_packed_sequences_is_that_of_each_alone(mode, skipped, lengths):
    batch = pack(random_sequences(lengths))
    hidden = torch.randn(len(batch.ids), 5, generator=torch.Generator().manual_seed(0))
    found = pool(hidden, batch, Pooling((mode,), include_prompt=skipped == 0), prompt_tokens=3).numpy()
    alone = torch.split(hidden.double(), batch.lengths.tolist())
    expected = np.stack([pooled_plainly(vectors.numpy(), mode, skipped) for vectors in alone])
    np.testing.assert_allclose(found, expected, atol=FLOAT32)


def test_several_modes_are_joined_in_their_order():
    batch = pack(random_sequences([4, 6, 6]))
    hidden = torch.randn(16, 5)
    joined = pool(hidden, batch, Pooling(("max", "cls")))
    parts = [pool(hidden, batch, Pooling((mode,))) for mode in ("max", "cls")]
    assert joined.shape == (3, 10)
    assert torch.equal(joined, torch.cat(parts, dim=1))


def test_sixteen_bit_vectors_are_averaged_in_float32():
    # 256 + 1 is 256 in bfloat16: a sum kept in 16 bits would stand still there.
    batch = pack(random_sequences([512]))
    mean = pool(torch.ones(512, 2, dtype=torch.bfloat16), batch, Pooling(("mean_sqrt_len_tokens",)))
    assert mean.dtype is torch.float32
    np.testing.assert_allclose(mean.numpy(), 512**0.5, rtol=1e-6)


def test_unknown_pooling_mode_is_refused():
    with pytest.raises(ValueError, match="median"):
        pool(torch.ones(3, 2), pack([[1, 2, 3]]), Pooling(("median",)))


def test_normalised_rows_have_unit_length_and_a_row_of_zeros_stays_zero():
    rows = normalize(np.array([[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]], dtype=np.float32))
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0, 0], [-1, 0]], atol=1e-7)
    assert rows.dtype == np.float32


def test_cosines_are_scipys_row_by_row():
    left, right = np.random.default_rng(0).normal(size=(2, 7, 5))
    expected = [1 - cosine(*pair) for pair in zip(left, right, strict=True)]
    np.testing.assert_allclose(cosines(left, right), expected, atol=1e-12)


@given(
    arrays(np.float32, (3, 4), elements=st.floats(-50, 50, width=32)),
    st.floats(0.01, 10),
)
def test_class_scores_are_scipys_softmax_of_the_divided_logits(logits, temperature):
    scores = class_scores(logits, temperature)
    np.testing.assert_allclose(scores, softmax(logits.astype(np.float64) / temperature, axis=-1), atol=1e-6)
    np.testing.assert_allclose(scores.sum(axis=-1), 1, atol=1e-6)


def test_scores_of_huge_logits_are_finite():
    assert class_scores(np.array([[1e30, 0.0, -1e30]]), 1e-3).tolist() == [[1.0, 0.0, 0.0]]


def judge(measure, classes=None) -> Judge:
    return Judge(measure, classes)


@given(arrays(np.int64, (4, 6), elements=st.integers(-50, 50)))
def test_comparable_embeddings_have_unit_length(outputs):
    rows = judge(Measure.COSINE).comparable(outputs.astype(np.float32))
    # But for those that are zero.
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), outputs.any(axis=1), atol=1e-5)


@given(arrays(np.float32, (4, 6), elements=st.floats(-50, 50, width=32)))
def test_comparable_class_probabilities_have_unit_length_and_are_never_negative(outputs):
    rows = judge(Measure.COSINE, lambda outputs: outputs[:, :3]).comparable(outputs)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert rows.shape == (4, 3)
    assert (rows >= 0).all()


def test_cosine_fidelity_of_embeddings_is_scipys_row_by_row():
    left, right = np.random.default_rng(1).normal(size=(2, 7, 5)).astype(np.float32)
    fidelity = judge(Measure.COSINE).fidelity(left, right)
    expected = [1 - cosine(*pair) for pair in zip(left, right, strict=True)]
    np.testing.assert_allclose(fidelity, expected, atol=1e-6)
    assert fidelity.dtype == np.float64


def test_cosine_fidelity_of_classes_is_the_bhattacharyya_coefficient_of_the_probabilities():
    left, right = np.random.default_rng(2).normal(size=(2, 7, 3)).astype(np.float32) * 3
    fidelity = judge(Measure.COSINE, lambda outputs: outputs).fidelity(left, right)
    expected = np.sqrt(softmax(left, axis=1) * softmax(right, axis=1)).sum(axis=1)
    np.testing.assert_allclose(fidelity, expected, atol=1e-6)


@given(arrays(np.float32, (2, 8, 3), elements=st.floats(-5, 5, width=32)))
def test_agreement_is_one_where_the_decision_stays_and_zero_where_it_does_not(pair):
    fidelity = judge(Measure.AGREEMENT, lambda outputs: outputs[:, ::-1]).fidelity(*pair)
    expected = [
        float(max(range(3), key=left[::-1].__getitem__) == max(range(3), key=right[::-1].__getitem__))
        for left, right in zip(*pair, strict=True)
    ]
    assert fidelity.tolist() == expected


@pytest.mark.parametrize("measure", Measure)
def test_outputs_that_do_not_change_are_wholly_faithful(measure):
    outputs = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
    fidelity = judge(measure, lambda outputs: outputs).fidelity(outputs, outputs)
    np.testing.assert_allclose(fidelity, 1, atol=1e-6)
