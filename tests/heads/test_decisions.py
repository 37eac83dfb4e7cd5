"""Class probabilities of logits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax

from attncache_core.heads.decisions import class_scores
from attncache_core.heads.zero_shot import entailment_class


@given(arrays(np.float32, (3, 4), elements=st.floats(-50, 50, width=32)), st.floats(0.01, 10))
def test_class_scores_are_scipys_softmax_of_the_divided_logits(logits, temperature):
    scores = class_scores(logits, temperature)
    np.testing.assert_allclose(scores, softmax(logits.astype(np.float64) / temperature, axis=-1), atol=1e-6)
    np.testing.assert_allclose(scores.sum(axis=-1), 1, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("multi_label", [False, True])
def test_least_temperature_decides_without_a_warning(multi_label):
    logits = np.array([[-3.0, 2.0]], np.float32)
    assert class_scores(logits, 5e-324, multi_label).tolist() == [[0, 1]]
    huge = np.array([[1e30, 0.0, -1e30]])
    assert multi_label or class_scores(huge, 1e-3).tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (None, 1),
        ({}, 1),
        (["entailment"], 1),
        ({"ENTAILS": 2}, 2),
        ({"entailment": 3}, None),
        ({"entail": None}, None),
    ],
)
def test_class_of_entailment_is_one_of_the_models(numbers, expected):
    names = {"0": "neutral", "1": "Entailment", "2": "contradiction"}
    assert entailment_class({"id2label": names, "label2id": numbers}) == expected
