"""The evaluation's report, number by number, against the engines' own outputs and scikit-learn."""

from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import normalize

from attncache_core import AttentionDatabase, PrefillEngine
from attncache_core.evaluation.classification import evaluate_classification


@pytest.fixture(scope="module")
def train(tiny_corpus):
    """Texts of the database; the label is whether a card or an account is spoken of."""
    texts = [sentence.text for sentence in tiny_corpus]
    return texts, [label_of(text) for text in texts]


@pytest.fixture(scope="module")
def test_set(tiny_corpus):
    """Recorded texts, and others made by exchanging halves."""
    recorded = [sentence.text for sentence in tiny_corpus[::12]]
    mixed = [
        " ".join(left.split()[: len(left.split()) // 2] + right.split()[len(right.split()) // 2 :])
        for left, right in pairwise(recorded)
    ]
    texts = [*recorded, *mixed]
    return texts, [label_of(text) for text in texts]


def label_of(text: str) -> str:
    return "yes" if {"card", "account", "bank"} & set(text.split()) else "no"


def engine_with(checkpoint, folder, **options) -> PrefillEngine:
    return PrefillEngine.load(checkpoint, database=AttentionDatabase.open(folder, **options), dtype="float32")


@pytest.fixture(scope="module")
def reusing(tiny_checkpoint, tiny_database, test_set):
    """θ lies between the similarities of the texts that are not recorded: half of them hit."""
    similarities = outputs(engine_with(tiny_checkpoint, tiny_database), test_set[0]).similarities
    middle = float(np.median(similarities[similarities < 1]))
    return engine_with(tiny_checkpoint, tiny_database, threshold=middle + 1e-6)


@pytest.fixture(scope="module")
def report(tiny_engine, reusing, train, test_set):
    return evaluate_classification(tiny_engine, reusing, train, test_set, rounds=2)


def outputs(engine: PrefillEngine, texts: list[str]):
    """The run of all texts in one batch: what a report over several must agree with."""
    return engine.run(engine.tokenize(texts), [True] * len(texts))


def test_every_number_is_that_of_the_engines_and_of_scikit_learn(
    tiny_engine, reusing, train, test_set, report
):
    full, reused = outputs(tiny_engine, test_set[0]), outputs(reusing, test_set[0])
    hits = np.array([outcome == "hit" for outcome in reused.outcomes])
    oracle = LogisticRegression(C=30.0, max_iter=2000)
    oracle.fit(normalize(outputs(tiny_engine, train[0]).outputs), train[1])
    right_full = oracle.predict(normalize(full.outputs)) == np.array(test_set[1])
    right_reuse = oracle.predict(normalize(reused.outputs)) == np.array(test_set[1])
    cosine = (normalize(full.outputs) * normalize(reused.outputs)).sum(axis=1)[hits]
    assert 0 < hits.sum() < len(hits)
    expected = {
        "texts": len(test_set[0]),
        "recorded_texts": int((reused.similarities == 1).sum()),
        "reused_heads": 12,
        "heads": 12,
        "threshold": reusing.database.search.threshold,
        "hit_rate": hits.mean(),
        "mean_cosine": cosine.mean(),
        "cosine_5th_percentile": np.percentile(cosine, 5),
        "accuracy_full": right_full.mean(),
        "accuracy_reuse": right_reuse.mean(),
        "hits_accuracy_full": right_full[hits].mean(),
        "hits_accuracy_reuse": right_reuse[hits].mean(),
        "agreement_on_hits": (right_full == right_reuse)[hits].mean(),  # of two labels
    }
    got = asdict(report)
    assert {name: got[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_times_are_positive_and_the_speed_up_is_their_ratio_in_a_single_round(
    tiny_engine, reusing, train, test_set
):
    seen = []
    report = evaluate_classification(
        tiny_engine, reusing, train, test_set, rounds=1, on_step=lambda *step: seen.append(step)
    )
    assert report.full_seconds > 0
    assert report.reuse_seconds > 0
    assert report.speedup == report.full_seconds / report.reuse_seconds
    assert seen == [(1, 1)]


def test_size_of_the_batches_changes_no_quality(tiny_engine, reusing, train, test_set, report):
    other = asdict(evaluate_classification(tiny_engine, reusing, train, test_set, batch_size=7, rounds=1))
    for name, value in asdict(report).items():
        if "seconds" not in name and name != "speedup":
            assert other[name] == pytest.approx(value, abs=1e-5), name


def test_without_hits_there_is_no_cosine_and_nothing_changes(
    tiny_engine, tiny_checkpoint, tiny_database, train, test_set
):
    never = engine_with(tiny_checkpoint, tiny_database, threshold=2.0)
    report = evaluate_classification(tiny_engine, never, train, test_set, rounds=1)
    assert report.hit_rate == 0
    assert report.accuracy_reuse == report.accuracy_full
    for value in (report.mean_cosine, report.cosine_5th_percentile, report.agreement_on_hits):
        assert np.isnan(value)


def test_recorded_texts_alone_lose_nothing(tiny_engine, tiny_checkpoint, tiny_database, train):
    self_hits = engine_with(tiny_checkpoint, tiny_database, threshold=1.0)
    report = evaluate_classification(tiny_engine, self_hits, train, train, rounds=1)
    assert report.recorded_texts == report.texts == len(train[0])
    assert report.hit_rate == 1
    # The maps were stored with 11 bits.
    assert report.mean_cosine > 0.9999
    assert report.agreement_on_hits > 0.98
