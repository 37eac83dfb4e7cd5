"""The measured gain: the decision per length group, the stored decision, and the engine's use of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from core_models import planned, prefill

from attncache_core.calibration.gain import Rehearsal, Timing, batches_of, measure_gain, require_gain
from attncache_core.calibration.paired import PairedGain, always_idle
from attncache_core.calibration.savings import fit_savings
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import MachineBusy
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.gain import MeasuredGain, Traffic
from attncache_core.reuse.maps.policy import Budget, ReusePolicy, uniform_policy
from attncache_core.reuse.plan import Outcome
from attncache_core.text.token_batch import pack

MACHINE = {"processor": "p", "device": "cpu", "threads": 2}
TRAFFIC = Traffic({5: 10, 7: 10, 9: 10}, {0: 1.0, 1: 0.5})


@pytest.fixture
def database(tiny_database, tmp_path):
    """A copy of the tiny database with two length groups: up to 7 tokens, and above."""
    opened = AttentionDatabase.open(Path(shutil.copytree(tiny_database, tmp_path / "a.db")))
    (group,) = opened.search.policy.groups
    policy = replace(opened.search.policy, groups=(replace(group, longest=7), group))
    return replace(opened, search=replace(opened.search, policy=policy))


@pytest.fixture
def engine(tiny_checkpoint, database):
    return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")


@pytest.fixture
def bounds(monkeypatch):
    """Lower bounds of gains. Each measurement removes the first entry; the median is above it by 0.0005.

    Each length group is measured with single texts, then with full batches; then all that pay together.
    """
    planned_bounds: list[float] = []

    def measured(*_):
        bound = planned_bounds.pop(0)
        return PairedGain(bound + 0.0005, bound, bound + 0.0005)

    monkeypatch.setattr("attncache_core.calibration.gain.compare", measured)
    return planned_bounds


def in_full_batches(*bounds):
    """The bounds of measurements in which single texts gain 0.5, and full batches the given numbers."""
    return [bound for full_batch in bounds for bound in (0.5, full_batch)]


def decide(engine, folder, min_gain=0.05, **circumstances):
    timing = Timing(engine, engine.map_reuse.database.search, always_idle)
    return measure_gain(timing, TRAFFIC, min_gain, {**MACHINE, **circumstances}, folder)


def test_groups_whose_bound_is_high_enough_reuse_and_the_others_do_not(engine, bounds, tmp_path):
    bounds += in_full_batches(0.049, 0.06, 0.05)  # each group alone, then the paying groups together
    decided = decide(engine, tmp_path)
    assert decided.paying == (1,)
    assert (decided.groups[0].full_batch, decided.groups[0].full_batch_bound) == (
        pytest.approx(0.0495),
        0.049,
    )
    # Only the second group pays, which has three sevenths of the tokens.
    assert decided.required == pytest.approx(0.05 * 3 / 7)


@pytest.mark.parametrize(
    ("at_512", "at_256", "at_128", "least"),
    [(0.1, 0.1, 0.1, 128), (0.1, 0.05, 0.0, 256), (0.1, 0.04, None, 512), (0.04, None, None, 896)],
)
def test_batches_that_gain_too_little_reuse_nothing(engine, bounds, tmp_path, at_512, at_256, at_128, least):
    bounds += [0.0, 0.2] * 3 + [bound for bound in (at_512, at_256, at_128) if bound is not None]
    assert decide(engine, tmp_path).least_tokens == least
    assert bounds == []
    assert decide(engine, tmp_path).least_tokens == least


def test_batches_of_any_size_reuse_if_one_text_gains_enough(engine, bounds, tmp_path):
    bounds += in_full_batches(0.2, 0.2, 0.2)
    assert decide(engine, tmp_path).least_tokens == 0


def test_engine_computes_small_batches_in_full(engine, bounds, tiny_corpus):
    bounds += [0.0, 0.2] * 3 + [0.0]
    require_gain(engine, 0.05)
    (recorded,) = engine.tokenize([tiny_corpus[0].text])
    assert engine.info().gain["least_tokens"] == 896
    few, many = (prefill(engine, [recorded] * count).outcomes for count in (1, 896))
    assert set(few) == {Outcome.SKIPPED_BY_COST}
    assert set(many) == {Outcome.HIT}


def test_groups_that_gain_alone_but_not_together_do_not_reuse(engine, bounds, tmp_path):
    bounds += in_full_batches(0.2, 0.2, 0.01)
    assert decide(engine, tmp_path).paying == ()


def test_busy_machine_decides_nothing_and_the_engine_reuses_nothing(engine, monkeypatch, tiny_corpus):
    def busy(*_):
        raise MachineBusy("")

    monkeypatch.setattr("attncache_core.calibration.gain.compare", busy)
    with pytest.raises(MachineBusy):
        require_gain(engine, 0.05)
    assert engine.map_reuse.awaits_gain
    assert engine.info().gain is None
    assert not (engine.map_reuse.database.folder / "gain.json").exists()
    recorded = engine.tokenize([tiny_corpus[0].text])
    assert prefill(engine, recorded).outcomes == (Outcome.SKIPPED_BY_COST,)


def test_gain_that_is_not_known_is_not_measured_if_the_caller_says_so(engine, bounds):
    require_gain(engine, 0.05, measure=False)
    assert engine.map_reuse.awaits_gain
    bounds += in_full_batches(0.2, 0.2, 0.2)
    require_gain(engine, 0.05)
    assert not engine.map_reuse.awaits_gain
    engine.map_reuse.reuse_in(())
    require_gain(engine, 0.05, measure=False)
    assert (engine.map_reuse.awaits_gain, engine.map_reuse.gain.paying) == (False, (0, 1))


def test_gain_is_measured_and_kept_also_while_other_machines_cannot_be_asked(
    tiny_checkpoint, database, bounds, tiny_corpus
):
    policy = replace(database.search.policy, budget=Budget(Measure.COSINE, 0.9))
    database = replace(database, search=replace(database.search, policy=policy))
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    reuse = engine.map_reuse
    recorded = engine.tokenize([tiny_corpus[0].text])
    reuse.share_findings(Mock(change=Mock(side_effect=OSError("nobody answers"))))
    reuse.keep_verified({})
    bounds += in_full_batches(0.2, 0.2, 0.2)
    require_gain(engine, 0.05)
    assert bounds == []
    assert prefill(engine, recorded).outcomes == (Outcome.NOT_SEARCHED,)
    reuse.share_findings(Mock(change=lambda _, change: change(None)))
    reuse.keep_verified({})
    assert prefill(engine, recorded).outcomes == (Outcome.HIT,)
    require_gain(engine, 0.05, measure=False)
    assert prefill(engine, recorded).outcomes == (Outcome.HIT,)


def test_gain_says_what_a_hit_saves_per_token(engine, monkeypatch, tmp_path):
    seconds = PairedGain(0.2, 0.2, 0.2, saved_seconds=3.0)
    monkeypatch.setattr("attncache_core.calibration.gain.compare", lambda *_: seconds)
    gain = decide(engine, tmp_path)
    engine.map_reuse.reuse_in(gain.paying, gain)
    for group, rate in TRAFFIC.hit_rates.items():
        lengths = TRAFFIC.of_group(engine.map_reuse.policy, group)
        tokens = np.mean([batch.offsets[-1] for batch in batches_of(lengths, 1024)])
        assert gain.groups[group].saved_per_token == pytest.approx(3.0 / tokens / rate)
        assert engine.map_reuse.search.saved_per_token[group] == gain.groups[group].saved_per_token


def test_engine_never_reuses_more_while_its_gain_is_measured(engine, monkeypatch):
    served = []

    def measured(*_):
        served.append(engine.map_reuse.search.paying)
        return PairedGain(0.2, 0.2, 0.2)

    monkeypatch.setattr("attncache_core.calibration.gain.compare", measured)
    require_gain(engine, 0.05)
    assert set(served) == {frozenset()}


def test_decision_that_is_not_clear_is_exact_and_measured_again_later(engine, monkeypatch, tmp_path):
    measured = []

    def open_gain(_, limit, __):
        measured.append(limit)
        return PairedGain(limit, limit - 0.01, limit + 0.01)

    monkeypatch.setattr("attncache_core.calibration.gain.compare", open_gain)
    assert decide(engine, tmp_path).paying == ()
    times = len(measured)
    assert decide(engine, tmp_path).paying == ()
    assert len(measured) == 2 * times


def test_next_start_reads_the_decision_of_its_machine_unless_another_gain_is_asked_for(
    engine, bounds, tmp_path
):
    bounds += in_full_batches(0.2, 0.0, 0.2, 0.0, 0.2, 0.2)
    first = decide(engine, tmp_path, processor="a")
    assert first.paying == (0,)
    assert decide(engine, tmp_path, processor="b").paying == (1,)
    assert decide(engine, tmp_path, processor="a") == first
    assert bounds == []
    for min_gain, paying in ((0.3, ()), (0.15, (0,))):
        bounds += in_full_batches(0.2, 0.1, 0.2)
        assert decide(engine, tmp_path, min_gain, processor="a").paying == paying
        assert bounds == []


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"min_gain": "x"}]'])
def test_damaged_gain_file_is_measured_again(engine, bounds, tmp_path, content):
    (tmp_path / "gain.json").write_text(content)
    bounds += in_full_batches(0.2, 0.0, 0.2)
    decided = decide(engine, tmp_path)
    (kept,) = json.loads((tmp_path / "gain.json").read_text())
    assert kept["paying"] == list(decided.paying) == [0]


def test_gain_is_measured_at_each_start_if_the_folder_cannot_be_written(engine, bounds, tmp_path):
    folder = tmp_path / "file"
    folder.write_text("in the place of a folder")
    for _ in range(2):
        bounds += in_full_batches(0.2, 0.0, 0.2)
        assert decide(engine, folder).paying == (0,)
        assert bounds == []


def test_engine_computes_groups_that_do_not_pay_in_full(engine, bounds, tiny_corpus):
    recorded = engine.tokenize([sentence.text for sentence in tiny_corpus[::10]])
    bounds += in_full_batches(0.0, 0.2, 0.2)
    require_gain(engine, 0.05)
    result = prefill(engine, recorded)
    for ids, outcome in zip(recorded, result.outcomes, strict=True):
        assert outcome is (Outcome.SKIPPED_BY_COST if len(ids) <= 7 else Outcome.HIT)
    told = engine.info().gain
    assert [group["reuses"] for group in told["groups"]] == [False, True]
    assert told["min_gain"] == 0.05
    bounds.clear()
    require_gain(engine, 0)
    assert set(prefill(engine, recorded).outcomes) == {Outcome.HIT}


def test_nothing_is_measured_if_only_recorded_texts_can_hit(tiny_checkpoint, database):
    policy = uniform_policy(Budget(Measure.COSINE, 0.9), 1.0)
    strict = replace(database, search=replace(database.search, policy=policy))
    engine = PrefillEngine.load(tiny_checkpoint, database=strict, dtype="float32")
    require_gain(engine, 0.05)
    assert engine.map_reuse.gain is None
    ids = engine.tokenize(["card help money"])
    assert prefill(engine, ids).outcomes == (Outcome.SKIPPED_BY_COST,)


def test_gain_of_real_passes_is_measured_and_reported(engine, monkeypatch):
    monkeypatch.setattr("attncache_core.calibration.paired.waited_seconds", lambda: 0.0)
    require_gain(engine, 0.05)
    assert isinstance(engine.map_reuse.gain, MeasuredGain)
    assert set(engine.map_reuse.gain.groups) == {0, 1}
    for gain in (*engine.map_reuse.gain.groups.values(), engine.map_reuse.gain.together):
        assert gain.one_text_bound <= gain.one_text
        assert gain.full_batch_bound <= gain.full_batch
    assert AttentionDatabase.open(engine.map_reuse.database.folder).verify() == []


def test_rehearsal_searches_and_hits_at_the_calibrated_hit_rates(engine, monkeypatch):
    search = engine.map_reuse.database.search
    rehearsal = Rehearsal.of(search, {0: 1.0, 1: 0.5})
    batch = pack([[0] * 6] * 40 + [[0] * 9] * 400)
    plan = planned(rehearsal, batch, engine.model.embed(batch), np.ones(440, dtype=bool))
    assert plan.hits[:40].all()
    assert 0.4 < plan.hits[40:].mean() < 0.6
    seen = []
    nearest = type(search).nearest
    monkeypatch.setattr(
        type(search),
        "nearest",
        lambda self, *arguments: seen.append(len(arguments)) or nearest(self, *arguments),
    )
    passes = []
    monkeypatch.setattr(
        "attncache_core.calibration.gain.compare", lambda compared, *_: passes.extend(compared)
    )
    Timing(engine, search, always_idle).gain_in([batch], {0: 1.0, 1: 0.5}, 0.05)
    ((without, with_reuse),) = passes
    without()
    assert seen == []
    with_reuse()
    assert len(seen) == 1


def test_traffic_has_the_lengths_and_hit_rates_of_the_calibration(database):
    # The database was built with an operator's threshold, so all texts are assumed to hit.
    traffic = database.traffic(database.search.policy)
    assert sum(traffic.lengths.values()) == database.manifest.quality["measured"]
    assert traffic.hit_rates == {0: 1.0, 1: 1.0}

    def rates(policy, **quality):
        manifest = replace(database.manifest, quality=database.manifest.quality | quality)
        return replace(database, manifest=manifest).traffic(policy).hit_rates

    measured = [{"hit_rate": 0.0}, {"hit_rate": 0.5}]
    assert rates(database.search.policy, groups=measured) == traffic.hit_rates
    budgeted = replace(database.search.policy, budget=Budget(Measure.COSINE, 0.9))
    assert rates(budgeted, groups=measured) == {1: 0.5}
    assert rates(budgeted, groups=measured[::-1], lengths={"5": 1}) == {0: 0.5}
    assert rates(database.search.policy, lengths={"9": 1}) == {1: 1.0}


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


def test_fitted_savings_reproduce_the_measured_model():
    def true(length: float, heads: int) -> float:
        return heads * (0.02 * length + 0.001 * length**2) - 3.0

    per_hit = fit_savings(
        [(length, heads, true(length, heads)) for length in (8, 16, 30) for heads in (4, 12)]
    )
    lengths = np.array([5, 20, 64])
    np.testing.assert_allclose(per_hit(lengths, 7), [true(length, 7) for length in lengths], rtol=1e-6)
