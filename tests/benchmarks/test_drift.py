"""`benchmarks drift`: the month, the sample, the windows, the costs and the rule; and one real month."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from click.testing import CliRunner
from core_models import random_sequences, random_text
from hypothesis import given
from hypothesis import strategies as st

from attncache_core import AttentionDatabase, BuildOptions
from attncache_core.calibration.trial import full_outputs
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget
from benchmarks.__main__ import main
from benchmarks.commands import drift, figures
from benchmarks.measuring import drift as simulated
from benchmarks.measuring.drift import Arm, Total, should_renew
from benchmarks.measuring.hit_costs import HitCosts, LengthCosts, LengthCount
from benchmarks.measuring.month import Reservoir, month, shares_of_topics
from benchmarks.measuring.verified import count_windows, serve

BUDGET = Budget(Measure.COSINE, 0.985, 0.95)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_topics_enter_one_after_the_other_and_each_takes_half():
    shares = [[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]
    assert shares_of_topics(3, 6).tolist() == [day for share in shares for day in (share, share)]


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 40), st.integers(1, 20))
def test_day_has_its_number_of_distinct_texts_in_the_shares_of_the_topics_and_samples_no_served_text(
    topics, days, sampled, served
):
    texts = [[f"{topic} {number}" for number in range(60)] for topic in range(topics)]
    made = month(texts, days, sampled, served, random())
    assert len(made) == days
    for day, shares in zip(made, shares_of_topics(topics, days), strict=True):
        for drawn, count in ((day.sampled, sampled), (day.served, served)):
            assert len(set(drawn)) == len(drawn) == count
            of_topic = Counter(int(text.split()[0]) for text in drawn)
            assert all(abs(of_topic[topic] - share * count) <= 1 for topic, share in enumerate(shares))
    assert not {text for day in made for text in day.served} & {text for day in made for text in day.sampled}


def test_text_of_a_half_life_ago_is_kept_half_as_often():
    kept: Counter[str] = Counter()
    tries = 4000
    for seed in range(tries):
        reservoir = Reservoir(1, 3.0, random(seed))
        reservoir.offer(1000, ["old"])
        reservoir.offer(1003, ["new"])
        kept.update(reservoir.texts())
    # One of weights 1 and 2 is chosen. Three standard deviations of a share of 4,000 draws.
    assert kept["old"] / tries == pytest.approx(1 / 3, abs=3 * np.sqrt(2 / 9 / tries))


@pytest.mark.parametrize(
    ("fidelities", "counted", "kept"),
    [
        ([], 0, 0),
        ([0.99] * 49, 0, 0),
        ([0.99] * 50, 1, 1),
        ([0.98] * 50, 1, 0),
        ([0.98] * 49, 0, 0),
        ([0.99] * 20 + [0.9] * 2, 1, 0),  # fails by the floor, whatever the number of hits
        ([0.99] * 200 + [0.98] * 200 + [0.99] * 40, 2, 1),
    ],
)
def test_windows_of_200_hits_count_from_50_hits_on_or_if_they_fail(fidelities, counted, kept):
    assert count_windows([fidelities], BUDGET) == (counted, kept)
    assert count_windows([fidelities, fidelities], BUDGET) == (2 * counted, 2 * kept)


def test_costs_are_those_of_hits_misses_and_searches_between_the_measured_lengths():
    costs = HitCosts(
        tuple(
            LengthCosts(length, 40.0 * length, ((4, 2.0 * length), (8, 4.0 * length)), miss, miss + 6, 0.5)
            for length, miss in ((10, 1.0), (20, 3.0))
        )
    )
    assert HitCosts.of_json(json.loads(json.dumps(costs.as_json()))) == costs
    counts = [LengthCount(15, texts=10, hits=5, misses=3, searched=2)]
    assert costs.full_microseconds(counts) == pytest.approx(10 * 600)
    # A hit saves half a microsecond per head and token; a miss costs 2, and a search 6. Half of them hit.
    assert costs.saved_microseconds(counts, 6) == pytest.approx(5 * 6 * 15 / 2 - 3 * 2 - 2 * 6 - 10 * 0.5)
    for hits in (0, 10):
        alike = [LengthCount(15, texts=10, hits=hits, misses=0, searched=0)]
        assert costs.saved_microseconds(alike, 6) == pytest.approx(hits * 6 * 15 / 2)


def test_verification_of_served_hits_tightens_a_policy_with_a_budget(tiny_engine, tiny_database, tmp_path):
    folder = shutil.copytree(tiny_database, tmp_path / "tiny.db")
    database = AttentionDatabase.open(folder)  # θ = 0 and all heads, which keeps no such budget
    served = random_sequences([5, 6, 7, 8, 9, 10] * 60, seed=3)
    exact = full_outputs(tiny_engine, served)
    free, policy = serve(tiny_engine, database, served, exact, BUDGET)
    assert policy == database.search.policy
    assert free.hits > 0
    assert free.below > 0
    assert 0 == free.kept < free.windows
    bound = replace(database.search, policy=replace(policy, budget=BUDGET))
    verified, tightened = serve(tiny_engine, replace(database, search=bound), served, exact, BUDGET)
    assert tightened.steps.groups[0] > 0
    assert verified.hits < free.hits
    assert (folder / "tightened.json").exists()


def of_arm(arm: Arm, saved: float, windows: int, kept: int) -> Total:
    return Total(arm, 0.5, 0.99, 0.0, windows, kept, {"full batch": saved, "one text": 0.0}, 100.0, 0.001)


@pytest.mark.parametrize(
    ("saved", "windows", "kept", "renews"),
    [(0.029, 20, 18, False), (0.031, 20, 18, True), (0.029, 20, 19, True), (0.029, 40, 36, False)],
)
def test_renewing_pays_if_the_daily_database_saves_a_hundredth_more_or_keeps_more_windows(
    saved, windows, kept, renews
):
    static = of_arm(Arm.STATIC, 0.02, 10, 9)
    assert should_renew(static, of_arm(Arm.DAILY, saved, windows, kept)) == renews


def run(folder, *arguments: object):
    return CliRunner().invoke(main, ["drift", "--output", str(folder / "month"), *map(str, arguments)])


@pytest.fixture(scope="module")
def arguments(tiny_checkpoint, tmp_path_factory):
    """The arguments of a small month of two topics, which differ in the lengths of their texts."""
    folder = tmp_path_factory.mktemp("topics")
    for name, words in (("short", (3, 5)), ("long", (6, 9))):
        generator = random(len(name))
        texts = dict.fromkeys(random_text(generator, int(generator.integers(*words))) for _ in range(600))
        (folder / f"{name}.txt").write_text("\n".join(texts), "utf-8")
    return (
        *("--model", tiny_checkpoint.folder, "--dtype", "float32", "--threads", 1),
        *("--data", folder / "short.txt", "--data", folder / "long.txt"),
        *("--days", 3, "--sample-texts", 250, "--asked-texts", 60),
        *("--min-cosine", 0.5, "--min-text-cosine", 0),
    )


def test_month_serves_three_databases_and_refuses_another_month(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "BuildOptions", partial(BuildOptions, heads="6", training_steps=20))
    monkeypatch.setattr(simulated, "_COST_PAIRS", 3)
    done = run(tmp_path, *arguments, "--json", tmp_path / "report.json")
    assert done.exit_code == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    days = {(day["day"], day["arm"]): day for day in report["days"]}
    assert list(days) == [(day, arm) for day in (2, 3) for arm in Arm]
    for (day, arm), measured in days.items():
        for view in ("calibrated", "tightened"):
            served = measured[view]
            assert served["texts"] == sum(part["texts"] for part in served["lengths"]) == 60
            assert served["hits"] == sum(part["hits"] for part in served["lengths"])
            assert served["kept"] <= served["windows"]
        assert measured["built"] == (0 if day == 3 and arm == Arm.STATIC else 250)
    # The database of short texts has no records of the topic that enters on the second of three days.
    assert days[3, Arm.DAILY]["calibrated"]["hits"] > days[3, Arm.STATIC]["calibrated"]["hits"] > 0
    assert days[2, Arm.RENEWED] == {**days[2, Arm.STATIC], "arm": Arm.RENEWED}
    assert report["decision"] in done.stdout
    assert report["decision"] in (page := figures.month(report))
    assert all(f"| {arm} |" in page for arm in Arm)
    folder = tmp_path / "month"
    assert {path.suffix for path in folder.glob("drift.*")} == {".csv", ".png"}
    assert [path.name for path in folder.glob("*.db")] == ["static.db"]

    other = run(tmp_path, *arguments, "--seed", 1)
    assert other.exit_code == 2
    assert "month has results of another month; choose another folder" in other.stderr
