"""Scores of tasks equal scores computed plainly and by SciPy."""

import numpy as np
import pytest
from core_models import random_sequences
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cosine
from scipy.stats import spearmanr

from attncache_core.errors import InvalidInput
from attncache_core.evaluation.tasks import (
    AgreementTask,
    ClassificationTask,
    RatedPairs,
    SimilarityTask,
    label_names,
)
from attncache_core.heads.comparator import Measure


def rated_pairs(count: int, seed: int) -> RatedPairs:
    sequences = random_sequences([5] * 2 * count, seed=seed)
    ratings = np.random.default_rng(seed).integers(0, 5, count).astype(float)
    return RatedPairs(sequences[:count], sequences[count:], ratings.tolist())


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)


def spearman(left: np.ndarray, right: np.ndarray, ratings) -> float:
    return spearmanr([1 - cosine(*pair) for pair in zip(left, right, strict=True)], ratings).statistic


@given(st.integers(3, 30), st.integers(0, 1000))
def test_similarity_is_the_spearman_correlation_of_cosines_and_ratings(count, seed):
    pairs = rated_pairs(count, seed)
    if len(set(pairs.ratings)) == 1:
        return
    outputs = vectors(2 * count, seed)
    scores = SimilarityTask({"pairs": pairs}).scores(outputs)
    assert scores == {"pairs": pytest.approx(spearman(outputs[:count], outputs[count:], pairs.ratings))}


def test_each_set_of_pairs_has_its_own_score():
    sets = {"first": rated_pairs(7, 1), "second": rated_pairs(4, 2), "third": rated_pairs(11, 3)}
    task = SimilarityTask(sets)
    outputs = vectors(len(task.sequences))
    expected, at = {}, 0
    for name, pairs in sets.items():
        count = len(pairs.ratings)
        left, right = outputs[at : at + count], outputs[at + count : at + 2 * count]
        # The sequences are in the order of the outputs: all left sides of a set, then all right sides.
        assert task.sequences[at : at + 2 * count] == [*pairs.left, *pairs.right]
        expected[name] = pytest.approx(spearman(left, right, pairs.ratings))
        at += 2 * count
    assert task.scores(outputs) == expected
    assert at == len(outputs) == len(task.sequences)


def test_correlation_has_no_scores_of_single_texts():
    assert SimilarityTask({"pairs": rated_pairs(3, 1)}).items(vectors(6)) is None


def test_accuracy_is_the_share_of_outputs_with_the_largest_logit_at_the_label(classifier):
    labels = ["card", "help", "card", "transfer", "help"]
    logits = np.array([[0, 2, 1], [5, 0, 6], [3, 2, 1], [9, 8, 7], [1, 2, 0]], dtype=np.float32)
    task = ClassificationTask("mail", classifier, random_sequences([5] * 5), labels)
    assert task.items(logits).tolist() == [1, 1, 0, 1, 0]
    assert task.scores(logits) == {"mail": 0.6}


def test_labels_that_are_not_classes_are_counted_and_refused_without_their_names(classifier, tiny_engine):
    for engine, labels, words in (
        (
            classifier,
            ["card", "secret", "x", "secret"],
            "2 labels of the texts are none of the model's 3 classes, the first one that of text 2",
        ),
        (tiny_engine, ["secret"], "none of the model's 0 classes"),
    ):
        with pytest.raises(InvalidInput, match=words) as refused:
            ClassificationTask("data", engine, random_sequences([5] * len(labels)), labels)
        assert refused.value.field == "data"
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["1", "0"], ["beta", "alpha"]),
        (["beta", "1"], ["beta", "1"]),
        (["2"], ["2"]),  # no such number
        (["\u00b2"], ["\u00b2"]),
        ([], []),
    ],
)
def test_numbers_stand_for_names_only_if_no_name_is_a_number(labels, names):
    assert label_names(labels, ["alpha", "beta"]) == names
    assert label_names(["4", "0"], ["1", "2", "3", "4", "5"]) == ["4", "0"]
    assert label_names(["0", "0"], ["1", "2", "3"]) == ["0", "0"]
    assert label_names(["1", "0"], ["1.0", "2.0"]) == label_names(["1", "0"], ["+1", "-1"]) == ["1", "0"]


def test_agreement_of_embeddings_is_the_mean_cosine_to_the_full_model(tiny_engine):
    full, changed = vectors(7), vectors(7, seed=1)
    task = AgreementTask(
        "texts", tiny_engine.decisions.comparator(Measure.COSINE), random_sequences([5] * 7), full
    )
    expected = [1 - cosine(*pair) for pair in zip(changed, full, strict=True)]
    np.testing.assert_allclose(task.items(changed), expected, atol=1e-6)
    assert task.scores(changed) == {"texts": pytest.approx(np.mean(expected), abs=1e-6)}
    assert task.scores(full) == {"texts": pytest.approx(1)}
    assert task.metric == "cosine"


def test_agreement_of_decisions_is_the_share_of_unchanged_decisions(classifier):
    full = np.array([[0, 2, 1], [5, 0, 6], [3, 2, 1], [9, 8, 7]], dtype=np.float32)
    changed = np.array([[0, 1, 0], [9, 0, 6], [1, 2, 3], [3, 2, 1]], dtype=np.float32)
    comparator = classifier.decisions.comparator(Measure.AGREEMENT)
    task = AgreementTask("texts", comparator, random_sequences([5] * 4), full)
    assert task.items(changed).tolist() == [1, 0, 0, 1]
    assert task.scores(changed) == {"texts": 0.5}
    assert task.metric == "agreement"
