"""A window of verified hits fails the budget if its mean is too low or if too many of its hits are harmed."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import (
    Budget,
    KindPolicy,
    LengthGroup,
    ReusePolicy,
    Steps,
    StrangenessLimit,
)
from attncache_core.reuse.maps.verification import (
    Band,
    Shortfall,
    VerifiedHits,
    Window,
    find_shortfall,
    window_of,
    windows_of,
)
from attncache_core.reuse.storage.layout import RecordKind

MEAN = Budget(Measure.COSINE, 0.985)  # without a floor
FLOOR = Budget(Measure.COSINE, 0.5, floor=0.95)
DECISIONS = Budget(Measure.AGREEMENT, 0.98)
NONE = Budget(Measure.COSINE, 0.0)

FIRST, SECOND = (Window(index, Band.USUAL) for index in range(2))

# Sums of eighths are exact, so the oracle's mean is exactly the same number.
eighths = st.integers(0, 8).map(lambda count: count / 8)


def values_of(most):
    """Lists of every length from 1 to `most`. Lists without a least length are nearly always short."""
    return st.integers(1, most).flatmap(lambda count: st.lists(eighths, min_size=count, max_size=count))


runs = st.tuples(st.sampled_from([FIRST, SECOND]), values_of(70))


# Shortfalls of one window.


@given(values=values_of(200), least=eighths.filter(bool))
def test_mean_of_fifty_or_more_hits_must_reach_the_budget(values, least):
    failed = find_shortfall(values, Budget(Measure.COSINE, least)) is not None
    assert failed == (len(values) >= 50 and np.mean(values) < least)


@given(hits=st.integers(1, 200), harmed=st.integers(0, 200), random=st.randoms())
def test_floor_fails_if_more_than_one_hit_in_a_hundred_is_harmed_with_confidence(hits, harmed, random):
    harmed = min(hits, harmed)
    values = [0.94] * harmed + [1.0] * (hits - harmed)
    random.shuffle(values)
    exact = binomtest(harmed, hits, alternative="greater").proportion_ci(0.95, method="exact")
    failed = harmed >= 2 and exact.low > 0.01
    assert find_shortfall(values, FLOOR) == (
        Shortfall(hits, pytest.approx(np.mean(values)), harmed) if failed else None
    )


def test_budget_of_decisions_has_only_a_mean():
    assert find_shortfall([1.0] * 40 + [0.0] * 9, DECISIONS) is None
    assert find_shortfall([1.0] * 49 + [0.0] * 1, DECISIONS) is None
    assert find_shortfall([1.0] * 48 + [0.0] * 2, DECISIONS) is not None


@pytest.mark.parametrize("budget", [MEAN, FLOOR])
def test_fidelity_of_nan_counts_as_too_low_and_harmed(budget):
    assert find_shortfall([1.0] * 58 + [math.nan] * 2, budget) is not None


@given(values=st.lists(st.one_of(st.just(math.nan), st.floats(-1, 1)), min_size=1, max_size=200))
def test_budget_that_does_not_bind_is_always_kept(values):
    assert find_shortfall(values, NONE) is None


def test_reason_names_what_failed():
    assert Shortfall(52, 0.979, 3).reason(MEAN) == (
        "mean cosine 0.9790 of the last 52 verified hits is below the budget 0.9850"
    )
    assert Shortfall(20, 0.979, 3).reason(replace(MEAN, floor=0.95)) == (
        "3 of the last 20 verified hits are below cosine 0.9500, and the budget allows 1%"
    )


# Shortfalls over time.


@given(runs=st.lists(runs, min_size=5, max_size=20), least=eighths.filter(bool))
def test_shortfall_occurs_if_the_last_200_hits_since_the_previous_shortfall_are_too_low(runs, least):
    verified = VerifiedHits(Budget(Measure.COSINE, least))
    since = {FIRST: [], SECOND: []}  # the oracle: all hits of a window since its last shortfall
    for window, values in runs:
        since[window] += values
        last = since[window][-200:]
        expected = len(last) >= 50 and np.mean(last) < least
        found = verified.add(window, values)
        assert (found is not None) == expected
        if found:
            assert (found.hits, found.mean) == (len(last), np.mean(last))
            assert window not in verified.new
            since[window] = []


def test_hits_older_than_the_window_are_forgotten():
    verified = VerifiedHits(MEAN)
    assert verified.add(FIRST, [1.0] * 1000) is None
    # The mean of 200 hits, of which n have fidelity 0.9, is too low if n * 0.1 / 200 > 0.015.
    found = [verified.add(FIRST, [0.9]) for _ in range(31)]
    assert found[:30] == [None] * 30
    assert found[30] == Shortfall(200, pytest.approx(0.9845), 0)


@pytest.mark.parametrize("other", [SECOND, replace(FIRST, band=Band.UNUSUAL), replace(FIRST, steps=1)])
def test_windows_do_not_affect_each_other(other):
    verified = VerifiedHits(MEAN)
    assert verified.add(FIRST, [0.5] * 49) is None
    assert verified.add(other, [0.5] * 49) is None
    assert verified.add(other, [1.0] * 2000) is None
    assert verified.add(FIRST, [0.5]) == Shortfall(50, 0.5, 0)


def test_earlier_hits_and_hits_of_other_servers_count_too():
    verified = VerifiedHits(MEAN)
    assert verified.add(FIRST, [0.5] * 10) is None
    assert list(verified.new[FIRST]) == [0.5] * 10
    verified.restart_from({FIRST: [0.5] * 49})
    assert verified.new == {}
    assert verified.add(FIRST, [0.5]) == Shortfall(50, 0.5, 0)


def test_fidelity_beyond_1_by_rounding_counts_as_1():
    verified = VerifiedHits(MEAN)
    verified.add(FIRST, [1.0000001, math.nan, -1.0000001])
    first, second, third = verified.new[FIRST]
    assert (first, third) == (1.0, -1.0)
    assert math.isnan(second)


# The window of a hit.

GROUP = {kind: KindPolicy(0.5) for kind in RecordKind}
POLICY = ReusePolicy(
    Budget(Measure.COSINE, 0.9),
    (LengthGroup(6, GROUP), LengthGroup(9, GROUP)),
    StrangenessLimit(strangest=0.04, usual=0.02),
)


@pytest.mark.parametrize(
    ("length", "strangeness", "window"),
    [
        (6, 0.02, Window(0, Band.USUAL)),
        (6, 0.021, Window(0, Band.UNUSUAL)),
        (7, 0.0, Window(1, Band.USUAL)),
        (30, 5.0, Window(1, Band.UNUSUAL)),
        (7, math.nan, Window(1, Band.USUAL)),
    ],
)
def test_window_of_a_hit_depends_on_its_length_group_and_its_strangeness(length, strangeness, window):
    assert window_of(POLICY, length, strangeness) == window
    without_a_limit = replace(POLICY, limit=None)
    assert window_of(without_a_limit, length, strangeness) == replace(window, band=Band.USUAL)


@given(steps=st.lists(st.sampled_from([0, 1, None]), max_size=8), length=st.sampled_from([5, 8]))
def test_window_has_the_steps_that_affect_its_hits(steps, length):
    policy = POLICY
    for index in steps:
        policy = policy.tightened(index)
    group = 0 if length == 5 else 1
    of_group, limit = steps.count(group), steps.count(None)
    usual, unusual = (window_of(policy, length, strangeness) for strangeness in (0.01, 0.03))
    assert usual == Window(group, Band.USUAL, of_group)
    assert unusual == Window(group, Band.UNUSUAL, of_group, limit)
    windows = windows_of(policy.steps)
    assert len(windows) == len(set(windows)) == 4
    assert {usual, unusual} < set(windows)


@given(steps=st.lists(st.sampled_from([0, 1, None]), max_size=8))
def test_tightened_to_repeats_the_steps_of_a_policy(steps):
    policy = POLICY
    for index in steps:
        policy = policy.tightened(index)
    assert policy.steps == Steps((steps.count(0), steps.count(1)), steps.count(None))
    again = POLICY.tightened_to(policy.steps)
    # The number of steps may differ, because a group that is off takes no further steps.
    assert [group.kinds for group in again.groups] == [group.kinds for group in policy.groups]
    assert again.limit is not None
    assert again.limit.strangest == policy.limit.strangest
