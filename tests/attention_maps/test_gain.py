"""The measured gain: what is decided from it, that the decision is kept, and what the engine makes of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.gain import (
    Gain,
    MeasuredGain,
    Rehearsal,
    Traffic,
    fit_savings,
    gain_of,
    measure_gain,
)
from attncache_core.attention_maps.policy import Budget, ReusePolicy, uniform_policy
from attncache_core.attention_maps.search import Outcome
from attncache_core.engine import PrefillEngine
from attncache_core.outputs import Measure
from attncache_core.tokens import pack

MACHINE = {"processor": "p", "device": "cpu", "threads": 2}
TRAFFIC = Traffic({5: 10, 7: 10, 9: 10}, {0: 1.0, 1: 0.5})


@pytest.fixture
def database(tiny_database, tmp_path):
    """A database of its own, with length groups up to 7 tokens and above."""
    opened = AttentionDatabase.open(Path(shutil.copytree(tiny_database, tmp_path / "a.db")))
    (group,) = opened.search.policy.groups
    policy = replace(opened.search.policy, groups=(replace(group, longest=7), group))
    return replace(opened, search=replace(opened.search, policy=policy))


@pytest.fixture
def engine(tiny_checkpoint, database):
    return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")


@pytest.fixture
def gains(monkeypatch):
    """What passes gain, foretold: a list from which each measurement takes its first entry."""
    foretold: list[float] = []

    def measured(*_):
        gain = foretold.pop(0)
        return Gain(gain, gain)

    monkeypatch.setattr("attncache_core.attention_maps.gain.gain_of", measured)
    return foretold


def decide(engine, folder, min_gain=0.05, **circumstances):
    search = engine.database.search
    return measure_gain(engine.model, search, TRAFFIC, min_gain, {**MACHINE, **circumstances}, folder)


def test_groups_that_gain_enough_reuse_and_the_others_do_not(engine, gains, tmp_path):
    gains += [0.049, 0.06, 0.05]  # two groups, and what is left of them together
    assert decide(engine, tmp_path).paying == (1,)


def test_the_smaller_of_both_kinds_of_batches_counts():
    assert Gain(one_text=-0.1, full_batch=0.3).least == -0.1
    assert Gain(one_text=0.2, full_batch=0.1).least == 0.1


def test_groups_that_gain_alone_and_not_together_are_computed(engine, gains, tmp_path):
    gains += [0.2, 0.2, 0.01]
    assert decide(engine, tmp_path).paying == ()


def test_decision_is_kept_for_the_next_start_and_nothing_is_measured(engine, gains, tmp_path):
    gains += [0.2, 0.0, 0.1]
    first = decide(engine, tmp_path)
    assert gains == []
    assert decide(engine, tmp_path) == first
    assert first.paying == (0,)


def test_another_least_gain_decides_anew_on_what_was_measured(engine, gains, tmp_path):
    gains += [0.2, 0.1, 0.2, 0.2]
    assert decide(engine, tmp_path, 0.3).paying == ()
    assert decide(engine, tmp_path, 0.15).paying == (0,)
    assert gains == []


def test_measured_anew_a_group_that_reused_goes_on_within_half_of_the_least_gain(engine, gains, tmp_path):
    gains += [0.06, 0.04, 0.06]
    assert decide(engine, tmp_path, torch="1").paying == (0,)
    gains += [0.03, 0.04, 0.03]
    assert decide(engine, tmp_path, torch="2").paying == (0,)
    gains += [0.02, 0.04, 0.03]
    assert decide(engine, tmp_path, torch="3").paying == ()
    gains += [0.03, 0.04, 0.03]
    assert decide(engine, tmp_path, torch="4").paying == ()


def test_machines_that_share_a_database_do_not_forget_each_others_decisions(engine, gains, tmp_path):
    gains += [0.2, 0.0, 0.2, 0.0, 0.2, 0.2]
    assert decide(engine, tmp_path, processor="a").paying == (0,)
    assert decide(engine, tmp_path, processor="b").paying == (1,)
    assert decide(engine, tmp_path, processor="a").paying == (0,)
    assert gains == []


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"min_gain": "x"}]'])
def test_damaged_file_is_measured_anew(engine, gains, tmp_path, content):
    (tmp_path / "gain.json").write_text(content)
    gains += [0.2, 0.0, 0.2]
    decided = decide(engine, tmp_path)
    (kept,) = json.loads((tmp_path / "gain.json").read_text())
    assert kept["paying"] == list(decided.paying) == [0]


def test_folder_that_cannot_be_written_is_measured_at_each_start(engine, gains, tmp_path):
    folder = tmp_path / "file"
    folder.write_text("in the place of a folder")
    for _ in range(2):
        gains += [0.2, 0.0, 0.2]
        assert decide(engine, folder).paying == (0,)
        assert gains == []


def test_engine_computes_groups_that_do_not_pay_in_full(engine, gains, tiny_corpus):
    recorded = engine.tokenize([sentence.text for sentence in tiny_corpus[::10]])
    gains += [0.0, 0.2, 0.2]
    engine.require_gain(0.05)
    result = engine.run(recorded, [True] * len(recorded))
    for ids, outcome in zip(recorded, result.outcomes, strict=True):
        assert outcome is (Outcome.CANNOT_PAY if len(ids) <= 7 else Outcome.HIT)
    told = engine.info()["gain"]
    assert [group["reuses"] for group in told["groups"]] == [False, True]
    assert told["min_gain"] == 0.05
    gains.clear()
    engine.require_gain(0)
    assert set(engine.run(recorded, [True] * len(recorded)).outcomes) == {Outcome.HIT}


def test_where_only_recorded_texts_would_hit_nothing_is_measured(tiny_checkpoint, database):
    policy = uniform_policy(Budget(Measure.COSINE, 0.9), 1.0)
    strict = replace(database, search=replace(database.search, policy=policy))
    engine = PrefillEngine.load(tiny_checkpoint, database=strict, dtype="float32")
    engine.require_gain(0.05)
    assert engine.gain is None
    ids = engine.tokenize(["card help money"])
    assert engine.run(ids, [True]).outcomes == (Outcome.CANNOT_PAY,)


def test_real_passes_are_measured_and_told(engine):
    engine.require_gain(0.05)
    assert isinstance(engine.gain, MeasuredGain)
    assert set(engine.gain.groups) == {0, 1}
    figures = [gain for each in engine.gain.groups.values() for gain in (each.one_text, each.full_batch)]
    assert np.isfinite(figures).all()
    assert AttentionDatabase.open(engine.database.folder).verify() == []


def test_passes_with_reuse_make_the_search_and_let_as_many_hit_as_calibration_saw(engine, monkeypatch):
    search = engine.database.search
    rehearsal = Rehearsal.of(search, {0: 1.0, 1: 0.5})
    batch = pack([[0] * 6] * 40 + [[0] * 9] * 400)
    plan = rehearsal.plan(batch, engine.model.embed(batch), np.ones(440, dtype=bool))
    assert plan.hits[:40].all()
    assert 0.4 < plan.hits[40:].mean() < 0.6
    seen = []
    nearest = type(search).nearest
    monkeypatch.setattr(
        type(search), "nearest", lambda self, *given: seen.append(len(given)) or nearest(self, *given)
    )
    gain_of(engine.model, rehearsal, {6: 3, 9: 2}, rounds=1)
    # Three batches of one text and three full ones, each twice: once to warm up.
    assert len(seen) == 12


def test_traffic_is_what_calibration_saw(database):
    # It was built with a threshold of its own: all is taken to hit, in the lengths that were measured.
    traffic = database.traffic(database.search.policy)
    assert sum(traffic.lengths.values()) == database.manifest.quality["measured"]
    assert traffic.hit_rates == {0: 1.0, 1: 1.0}


def test_token_share_of_groups():
    policy = ReusePolicy(
        Budget(Measure.COSINE, 0.9),
        tuple(
            replace(uniform_policy(Budget(Measure.COSINE, 0.9), 0.5).groups[0], longest=tokens)
            for tokens in (7, 20)
        ),
    )
    assert TRAFFIC.token_share(policy, [0]) == pytest.approx(12 / 21)
    assert TRAFFIC.of_group(policy, 1) == {9: 10}


def test_savings_are_fitted_to_what_was_measured():
    def true(length: float, heads: int) -> float:
        return heads * (0.02 * length + 0.001 * length**2) - 3.0

    per_hit = fit_savings(
        [(length, heads, true(length, heads)) for length in (8, 16, 30) for heads in (4, 12)]
    )
    lengths = np.array([5, 20, 64])
    np.testing.assert_allclose(per_hit(lengths, 7), [true(length, 7) for length in lengths], rtol=1e-6)
