"""The familiarity test: its statistics against plain counts, its fit, and its effect in the engine."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from core_models import prefill, random_sequences
from hypothesis import given
from hypothesis import strategies as st

from attncache_core import native
from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.calibration.familiarity_fit import TokenStatistics, count_tokens, fit_familiarity
from attncache_core.engine.explain import explain
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import CorruptDatabase
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.familiarity import (
    Familiarity,
    read_familiarity,
    sequence_statistics,
    write_familiarity,
)
from attncache_core.reuse.maps.policy import StrangenessLimit
from attncache_core.reuse.plan import Outcome
from service.commands.database import show_database

WEIGHTS = np.random.default_rng(0).normal(size=50).astype(np.float32)
sequences_of_ids = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=30), min_size=1, max_size=12)


def packed(sequences):
    return np.concatenate([np.array(ids) for ids in sequences]), np.array([len(ids) for ids in sequences])


def plain_statistics(ids: list[int]) -> list[float]:
    """Return the statistics of one sequence, computed without vectorisation over sequences."""
    weights, length = WEIGHTS[ids], len(ids)
    pairs = [(ids[max(position - 1, 0)], token) for position, token in enumerate(ids)]
    equal = sum(before == token for before, token in pairs)
    return [
        weights.mean(),
        weights.std(),
        1 - len(set(ids)) / length,
        1 - len(set(pairs)) / length,
        equal / length,
        weights.max(),
        np.log(length),
        weights.mean() / length,
    ]


@given(sequences_of_ids)
def test_statistics_equal_plain_counts(sequences):
    ids, lengths = packed(sequences)
    found = sequence_statistics(WEIGHTS[ids], ids, lengths)
    # The tolerance covers float32 and a standard deviation computed from squares.
    np.testing.assert_allclose(found, [plain_statistics(sequence) for sequence in sequences], atol=2e-3)


@given(sequences_of_ids)
def test_strangeness_is_the_same_in_any_batch_with_and_without_compiled_code(sequences):
    coefficients = np.linspace(-0.3, 0.4, 8, dtype=np.float32)
    familiarity = Familiarity(WEIGHTS, coefficients, np.array([-4.0], np.float32))
    statistics = [plain_statistics(sequence) for sequence in sequences]
    # The tolerance is that of the statistics.
    expected = np.exp(statistics @ coefficients.astype(np.float64) - 4)
    for compiled in (native.kernel, lambda: None):
        with mock.patch.object(native, "kernel", compiled):
            made = replace(familiarity)
            together = made.strangeness(*packed(sequences))
            alone = [made.strangeness(*packed([ids]))[0] for ids in sequences]
        np.testing.assert_allclose(together, expected, rtol=1e-3)
        np.testing.assert_allclose(together, alone, rtol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_token_without_a_weight_is_refused(compiled):
    familiarity = Familiarity(WEIGHTS, np.ones(8, np.float32), np.ones(1, np.float32))
    with nullcontext() if compiled else mock.patch.object(native, "kernel", return_value=None):
        familiarity.strangeness(*packed([[3, 49]]))
        with pytest.raises(IndexError):
            familiarity.strangeness(*packed([[3, 50]]))


@pytest.mark.parametrize("fitted", [True, False])
def test_familiarity_test_and_token_counts_are_unchanged_after_reading(tmp_path, fitted):
    familiarity = Familiarity(WEIGHTS, np.ones(8, np.float32), np.ones(1, np.float32)) if fitted else None
    name = write_familiarity(tmp_path, familiarity, np.arange(50))
    read, counts = read_familiarity(tmp_path / name)
    assert counts.tolist() == list(range(50))
    assert (read is None) is not fitted
    if read:
        assert read.strangeness(*packed([[1, 2]])) == familiarity.strangeness(*packed([[1, 2]]))


def test_damaged_file_is_corrupt(tmp_path):
    path = tmp_path / write_familiarity(tmp_path, None, np.arange(50))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptDatabase, match="familiarity"):
        read_familiarity(path)


def test_interrupted_calibration_leaves_the_database_unchanged(strict):
    folder = strict.folder
    before = AttentionDatabase.open(folder)
    write_familiarity(
        folder, Familiarity(WEIGHTS, np.ones(8, np.float32), np.ones(1, np.float32)), np.arange(50)
    )
    after = AttentionDatabase.open(folder)
    assert after.verify() == []
    assert after.token_counts.tolist() == before.token_counts.tolist()


def test_statistics_of_more_sequences_than_fit_into_a_key_are_correct():
    sequences = [[5, 5, 5, 5], *[[1, 2, 3]] * 40_000, [7, 7, 7, 8]]
    ids, lengths = packed(sequences)
    found = sequence_statistics(WEIGHTS[ids], ids, lengths)
    np.testing.assert_allclose(
        found[[0, 1, -1]], [plain_statistics(sequences[index]) for index in (0, 1, -1)], atol=2e-3
    )
    assert (found[1:-1] == found[1]).all()


@pytest.fixture(scope="module")
def fitted(tiny_engine):
    """A fit to texts of even tokens with little damage, and of odd or equal tokens with much damage."""
    vocabulary = tiny_engine.tokenizer.vocabulary
    random = np.random.default_rng(3)
    even = np.arange(6, vocabulary - 1, 2)
    like = [random.choice(even, size=length).tolist() for length in random.integers(8, 20, 200)]
    odd = [(random.choice(even, size=length) + 1).tolist() for length in random.integers(8, 20, 120)]
    same = [[int(random.choice(even))] * int(length) for length in random.integers(8, 20, 120)]
    damage = np.concatenate([random.gamma(4, 0.002, 200), random.gamma(4, 0.03, 240)])
    kinds = [None] * 200 + [f"{kind} {index % 6}" for kind in ("odd", "same") for index in range(120)]
    counts = count_tokens(like[:100], vocabulary)
    assert counts.tolist() == np.bincount(np.concatenate(like[:100]), minlength=vocabulary).tolist()
    tokens = TokenStatistics(tiny_engine.model, counts)
    sequences = [*like, *odd, *same]
    return sequences, *fit_familiarity(tokens, sequences, damage, kinds)


def test_texts_with_much_damage_are_stranger_even_if_their_kind_was_held_out(fitted):
    sequences, familiarity, cross_validated = fitted
    whole = familiarity.strangeness(*packed(sequences))
    for strangeness in (whole, cross_validated):
        like, odd, same = np.split(strangeness, [200, 320])
        assert np.quantile(like, 0.95) < np.quantile(odd, 0.05)
        assert np.quantile(like, 0.95) < np.quantile(same, 0.05)


def test_strangeness_is_near_the_98th_percentile_of_the_damage(fitted):
    sequences, familiarity, _ = fitted
    like = familiarity.strangeness(*packed(sequences))[:200]
    # The damage of texts of even tokens has mean 0.008, 90th percentile 0.0134 and 98th percentile 0.0182.
    assert 0.015 < np.median(like) < 0.025


@pytest.fixture(scope="module")
def limited(tiny_engine, tiny_corpus, tmp_path_factory, fixed_costs):  # noqa: ARG001 - patches the calibration
    """A calibrated database with a budget so low that every familiar text keeps it."""
    folder = tmp_path_factory.mktemp("limited") / "a.db"
    options = BuildOptions(min_cosine=0.1, min_text_cosine=0, prototypes=4, training_steps=10)
    build_database(tiny_engine, tiny_corpus, folder, options)
    return folder


@pytest.fixture
def strict(limited, tmp_path):
    """The database with a limit of strangeness below every text."""
    database = AttentionDatabase.open(Path(shutil.copytree(limited, tmp_path / "a.db")))
    policy = replace(database.search.policy, limit=StrangenessLimit(-1.0, 0.01))
    return replace(database, search=replace(database.search, policy=policy))


def texts_of(tiny_corpus):
    """Return recorded texts, and other token sequences of the same lengths."""
    texts = [sentence.text for sentence in tiny_corpus[::6]]
    return texts, random_sequences([len(text.split()) + 2 for text in texts], seed=77)


def test_most_familiar_texts_pass_the_calibrated_limit(tiny_checkpoint, tiny_corpus, limited, capsys):
    database = AttentionDatabase.open(limited)
    limit = database.search.policy.limit
    assert database.verify() == []
    assert limit.usual <= limit.strangest
    unfamiliar = database.manifest.quality["unfamiliar"]
    assert unfamiliar["texts"] > 0
    assert unfamiliar["left_out"]["kinds"] >= 20
    worst = unfamiliar["left_out"]["worst"]
    assert worst["mean"] >= database.search.policy.budget.least
    show_database(database)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"worst mean of a kind is {worst['mean']:.4f} ({worst['kind']}, {worst['hits']} hits)" in shown
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    _, others = texts_of(tiny_corpus)
    result = prefill(engine, others)
    assert np.mean([outcome.is_hit for outcome in result.outcomes]) > 0.5
    assert np.isfinite(result.strangeness).all()


@pytest.mark.parametrize("searched", [False, True])
def test_unfamiliar_texts_are_computed_in_full_unless_they_are_recorded(
    tiny_checkpoint, tiny_engine, tiny_corpus, strict, searched
):
    policy = strict.search.policy.with_threshold(-9.0) if searched else strict.search.policy
    database = replace(strict, search=replace(strict.search, policy=policy))
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    texts, others = texts_of(tiny_corpus)
    recorded = engine.tokenize(texts)
    result = prefill(engine, [*recorded, *others])
    assert set(result.outcomes[: len(texts)]) == {Outcome.HIT}
    assert set(result.outcomes[len(texts) :]) == {Outcome.UNFAMILIAR}
    full = prefill(tiny_engine, others, reuse=False).outputs
    np.testing.assert_allclose(result.outputs[len(texts) :], full, atol=1e-5)
    explained = explain(engine, others[0])
    assert (explained.outcome, explained.strangeness) == (Outcome.UNFAMILIAR, result.strangeness[len(texts)])
    # Declined reuse counts as not searched, and not as unfamiliar.
    assert set(prefill(engine, others, reuse=False).outcomes) == {Outcome.NOT_SEARCHED}


def test_raising_the_limit_only_adds_hits_and_recorded_texts_hit_with_any(
    tiny_checkpoint, tiny_engine, tiny_corpus, strict
):
    texts, others = texts_of(tiny_corpus)
    sequences = [*tiny_engine.tokenize(texts), *others]

    def served(strangest):
        limit = StrangenessLimit(strangest, 0.0)
        policy = replace(strict.search.policy.with_threshold(-9.0), limit=limit)
        database = replace(strict, search=replace(strict.search, policy=policy))
        engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
        result = prefill(engine, sequences)
        return {index for index, outcome in enumerate(result.outcomes) if outcome.is_hit}, result.strangeness

    before = set(range(len(texts)))
    for strangest in (0.0, 0.001, 0.01, 0.1, 1.0, 100.0):
        hits, strangeness = served(strangest)
        assert before <= hits
        before = hits
    assert len(before) > len(texts)
    # A text exactly at the limit hits.
    others_hit = [index for index in before if index >= len(texts)]
    assert served(float(strangeness[others_hit].max()))[0] == before
