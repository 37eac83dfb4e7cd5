"""A new generation serves only if its held-out hits keep the budget and save at least 1 % more time."""

from dataclasses import replace

import numpy as np
import pytest

from attncache_core.calibration.trial import Trial, why_refused
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget

BUDGET = Budget(Measure.COSINE, 0.985, 0.95)


def trial(fidelity=0.99, hits=400, saved=10.0, groups=None, clients=None):
    values = np.full(hits, fidelity, dtype=np.float64)
    of_groups = np.zeros(hits, dtype=np.int64) if groups is None else np.array(groups)
    of_clients = np.full(hits, -1) if clients is None else np.array(clients)
    return Trial(500, saved, values, of_groups, ["1-8", "9-"], of_clients)


PRESENT = trial(saved=10.0)


SLOW = trial(saved=-5.0)


@pytest.mark.parametrize(
    ("present", "new", "said"),
    [
        (PRESENT, trial(saved=10.1), None),
        (PRESENT, trial(saved=10.09), "at least 1 % more is needed"),
        # A present generation that costs time needs no growth, but the new one must save.
        (SLOW, trial(saved=0.1), None),
        (SLOW, trial(saved=0.0), "save no time"),
        # However much it saves.
        (PRESENT, trial(0.984, saved=1000.0), "the budget is 0.985"),
        (PRESENT, trial(hits=0, saved=0.0), "no held-out text hits"),
        (PRESENT, replace(trial(hits=0), pays=False), "less than --min-gain"),
    ],
    ids=["more", "too-little-more", "any", "nothing", "mean", "no-hits", "does-not-pay"],
)
def test_generation_that_keeps_the_budget_and_saves_one_percent_more_is_accepted(present, new, said):
    found = why_refused(present, new, BUDGET)
    assert found is None if said is None else said in found


def test_floor_is_kept_by_99_of_100_hits_with_confidence():
    assert why_refused(PRESENT, trial(hits=298, saved=20.0), BUDGET)
    assert why_refused(PRESENT, trial(hits=299, saved=20.0), BUDGET) is None
    new = trial(0.999, saved=20.0)
    new.fidelity[0] = 0.9  # one of 400 harmed: the bound of the share is 1.2 %
    assert "kept floor 0.9" in why_refused(PRESENT, new, BUDGET)
    many = trial(0.999, hits=473, saved=20.0)
    many.fidelity[0] = 0.9  # one of 473: 1 %
    assert why_refused(PRESENT, many, BUDGET) is None


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (BUDGET, "is 0.9850 (bound 0.98499) and the kept floor 0.9850, and the budget is 0.985"),
        (Budget(Measure.COSINE, 0.9, 0.985), "the kept floor 0.98499, and the budget"),
    ],
)
def test_value_that_is_hardly_below_the_budget_is_shown_below_it(budget, said):
    assert said in why_refused(PRESENT, trial(0.98499, saved=20.0), budget)


@pytest.mark.parametrize("part", ["groups", "clients"])
def test_part_that_is_hardly_below_the_budget_is_shown_below_it(part):
    new = trial(0.999, saved=20.0, **{part: [0] * 360 + [1] * 40})
    new.fidelity[360:] = 0.98499
    assert "0.98499" in why_refused(PRESENT, new, BUDGET)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"groups": [0] * 350 + [1] * 50}, "of 9- tokens is 0.9800"),
        ({"clients": [0] * 360 + [1] * 40}, "of the 40 held-out hits of one API key is 0.9800"),
        # Few hits of a key, and hits without one, count only among all.
        ({"clients": [0] * 360 + [1] * 19 + [-1] * 21}, None),
    ],
    ids=["group", "key", "few-of-a-key"],
)
def test_every_length_group_and_every_api_key_keeps_the_budget(parts, said):
    new = trial(0.999, saved=20.0, **parts)
    assert why_refused(PRESENT, new, BUDGET) is None
    (of_parts,) = parts.values()
    new.fidelity[np.array(of_parts) != 0] = 0.98
    found = why_refused(PRESENT, new, BUDGET)
    assert found is None if said is None else said in found


def test_length_group_with_too_few_hits_proves_nothing():
    new = trial(0.999, saved=20.0, groups=[0] * 381 + [1] * 19)
    assert "19 held-out texts of 9- tokens hit" in why_refused(PRESENT, new, BUDGET)


def test_figures_hold_numbers_only():
    assert PRESENT.figures() == {
        "hit_rate": 0.8,
        "mean": pytest.approx(0.99),
        "least": 0.99,
        "saved_microseconds": 10.0,
    }
