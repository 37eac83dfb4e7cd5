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


def test_generation_that_keeps_the_budget_and_saves_more_is_accepted():
    assert why_refused(PRESENT, trial(saved=10.1), BUDGET) is None


def test_less_than_one_percent_more_time_is_refused():
    assert "at least 1 % more is needed" in why_refused(PRESENT, trial(saved=10.09), BUDGET)


def test_present_generation_that_costs_time_needs_no_growth_but_the_new_one_must_save():
    slow = trial(saved=-5.0)
    assert why_refused(slow, trial(saved=0.1), BUDGET) is None
    assert "save no time" in why_refused(slow, trial(saved=0.0), BUDGET)


def test_mean_below_the_budget_is_refused_however_much_it_saves():
    assert "the budget is 0.985" in why_refused(PRESENT, trial(0.984, saved=1000.0), BUDGET)


def test_floor_is_kept_by_99_of_100_hits_with_confidence():
    new = trial(0.999, saved=20.0)
    new.fidelity[0] = 0.9  # one of 400 harmed: the bound of the share is 1.2 %
    assert "kept floor 0.9" in why_refused(PRESENT, new, BUDGET)
    many = trial(0.999, hits=473, saved=20.0)
    many.fidelity[0] = 0.9  # one of 473: 1 %
    assert why_refused(PRESENT, many, BUDGET) is None


@pytest.mark.parametrize(("hits", "accepted"), [(298, False), (299, True)])
def test_floor_needs_299_hits(hits, accepted):
    assert (why_refused(PRESENT, trial(hits=hits, saved=20.0), BUDGET) is None) is accepted


def test_every_length_group_keeps_the_budget():
    groups = [0] * 350 + [1] * 50
    new = trial(0.999, saved=20.0, groups=groups)
    assert why_refused(PRESENT, new, BUDGET) is None
    new.fidelity[350:] = 0.98
    assert "of 9- tokens is 0.9800" in why_refused(PRESENT, new, BUDGET)


def test_length_group_with_too_few_hits_proves_nothing():
    new = trial(0.999, saved=20.0, groups=[0] * 381 + [1] * 19)
    assert "19 held-out texts of 9- tokens hit" in why_refused(PRESENT, new, BUDGET)


def test_every_api_key_keeps_the_budget():
    new = trial(0.999, saved=20.0, clients=[0] * 360 + [1] * 40)
    assert why_refused(PRESENT, new, BUDGET) is None
    new.fidelity[360:] = 0.98
    assert "of the 40 held-out hits of one API key is 0.9800" in why_refused(PRESENT, new, BUDGET)


def test_few_hits_of_an_api_key_and_hits_without_one_count_only_among_all():
    new = trial(0.999, saved=20.0, clients=[0] * 360 + [1] * 19 + [-1] * 21)
    new.fidelity[360:] = 0.98
    assert why_refused(PRESENT, new, BUDGET) is None


def test_generation_without_hits_is_refused():
    assert why_refused(PRESENT, trial(hits=0, saved=0.0), BUDGET) == "no held-out text hits"


def test_generation_that_does_not_pay_is_refused_for_that():
    assert "less than --min-gain" in why_refused(PRESENT, replace(trial(hits=0), pays=False), BUDGET)


def test_figures_hold_numbers_only():
    assert PRESENT.figures() == {
        "hit_rate": 0.8,
        "mean": pytest.approx(0.99),
        "least": 0.99,
        "saved_microseconds": 10.0,
    }
