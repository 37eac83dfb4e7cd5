"""A window of hits fails the budget if they show that their mean is too low, or that too many are harmed."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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

fidelities = st.one_of(st.just(1.0), st.floats(-1, 1), st.floats(0.97, 1))


def values_of(most):
    """Lists of every length from 1 to `most`. Lists without a least length are nearly always short."""
    return st.integers(1, most).flatmap(lambda count: st.lists(fidelities, min_size=count, max_size=count))


runs = st.tuples(st.sampled_from([FIRST, SECOND]), values_of(70))


def fails(losses, allowed):
    """Whether hits of these losses, oldest first, fail: hit by hit, as the source of the method has it."""
    capitals = [0.0, 0.0, 0.0]
    for loss in losses:
        capitals = [
            (capital + 1) * (1 + bet * (loss / allowed - 1))
            for capital, bet in zip(capitals, (0.01, 0.04, 0.16), strict=True)
        ]
    return sum(capitals) / 3 >= 2000


def hits_until_failure(fidelities, budget):
    """Return after how many hits a server finds a shortfall if it looks every 8 hits; else infinity."""
    verified = VerifiedHits(budget)
    for first in range(0, len(fidelities), 8):
        if verified.add(FIRST, fidelities[first : first + 8]):
            return first + 8
    return math.inf


def decisions_of(rng, changed, hits):
    return (rng.random(hits) >= changed).astype(float)


def cosines_of(rng, loss, hits):
    return np.maximum(0, 1 - loss * rng.lognormal(-0.32, 0.8, hits))


# Shortfalls of one window.


@given(values=values_of(200), least=st.sampled_from([0.5, 0.9, 0.985, 0.9999]))
def test_mean_fails_as_the_method_says_and_is_below_the_budget_then(values, least):
    budget = Budget(Measure.COSINE, least)
    found = find_shortfall(values, budget)
    assert (found is not None) == fails([1 - value for value in values], 1 - least)
    if found:
        last = values[-found.hits :]
        assert found == Shortfall(len(last), pytest.approx(np.mean(last)), found.harmed, True)
        assert found.mean < least


@given(hits=st.integers(1, 200), harmed=st.integers(0, 20), random=st.randoms())
def test_floor_fails_as_the_method_says_and_too_many_are_harmed_then(hits, harmed, random):
    harmed = min(hits, harmed)
    values = [0.94] * harmed + [1.0] * (hits - harmed)
    random.shuffle(values)
    found = find_shortfall(values, FLOOR)
    assert (found is not None) == fails([value < 0.95 for value in values], 0.01)
    if found:
        last = values[-found.hits :]
        assert found == Shortfall(len(last), pytest.approx(np.mean(last)), last.count(0.94), False)
        assert found.harmed / found.hits > 0.01


@pytest.mark.parametrize(
    ("budget", "at_budget"),
    [
        (DECISIONS, lambda rng: decisions_of(rng, 0.02, 8000)),
        (MEAN, lambda rng: cosines_of(rng, 0.015, 8000)),
        (FLOOR, lambda rng: 0.95 - 0.01 * (rng.random(8000) < 0.01)),
    ],
)
def test_hits_at_the_budget_fail_once_in_2000_at_most_on_average(budget, at_budget):
    rng = np.random.default_rng(1)
    found = [min(8000, hits_until_failure(at_budget(rng), budget)) for _ in range(16)]
    assert np.mean(found) >= 2000


@pytest.mark.parametrize(
    ("budget", "twice_the_loss", "half_the_loss"),
    [
        (DECISIONS, lambda rng: decisions_of(rng, 0.04, 1000), lambda rng: decisions_of(rng, 0.01, 1000)),
        (MEAN, lambda rng: cosines_of(rng, 0.03, 1000), lambda rng: cosines_of(rng, 0.0075, 1000)),
        (
            FLOOR,
            lambda rng: 0.95 - 0.01 * (rng.random(1000) < 0.02),
            lambda rng: 0.95 - 0.01 * (rng.random(1000) < 0.005),
        ),
    ],
)
def test_twice_the_loss_is_found_also_after_many_good_hits_and_half_the_loss_is_not(
    budget, twice_the_loss, half_the_loss
):
    rng = np.random.default_rng(2)
    good = np.full(2000, 1.0)
    found = [hits_until_failure(twice_the_loss(rng), budget) for _ in range(20)]
    behind = [hits_until_failure([*good, *twice_the_loss(rng)], budget) - 2000 for _ in range(20)]
    assert sum(hits < 1000 for hits in found) >= 15
    assert sum(hits < 1000 for hits in behind) >= 15
    assert sum(hits_until_failure(half_the_loss(rng), budget) < 1000 for _ in range(20)) <= 3


def test_budget_of_decisions_has_only_a_mean():
    assert find_shortfall([1.0] * 40 + [0.0] * 3, DECISIONS) is None
    assert find_shortfall([1.0] * 40 + [0.0] * 4, DECISIONS) == Shortfall(4, 0.0, 4, True)


@pytest.mark.parametrize("budget", [MEAN, FLOOR])
def test_fidelity_of_nan_counts_as_too_low_and_harmed(budget):
    assert find_shortfall([1.0] * 50 + [math.nan] * 4, budget) is not None


def test_budget_of_1_allows_for_rounding_only():
    budget = Budget(Measure.COSINE, 1.0)
    assert find_shortfall([1 - 6e-8] * 900, budget) is None
    assert find_shortfall([1 - 1e-4] * 4, budget) is not None


@given(values=st.lists(st.one_of(st.just(math.nan), st.floats(-1, 1)), min_size=1, max_size=200))
def test_budget_that_does_not_bind_is_always_kept(values):
    assert find_shortfall(values, NONE) is None
    assert find_shortfall([-1.0] * 200, NONE) is None


def test_reason_names_what_failed():
    assert Shortfall(52, 0.984996, 3, True).reason(MEAN) == (
        "mean cosine 0.984996 of the last 52 verified hits is below the budget 0.985"
    )
    assert Shortfall(20, 0.979, 3, False).reason(replace(MEAN, floor=0.95)) == (
        "3 of the last 20 verified hits are below cosine 0.9500, and the budget allows 1%"
    )


# Shortfalls over time.


@given(runs=st.lists(runs, min_size=5, max_size=20))
def test_shortfall_is_found_in_the_last_hits_since_the_previous_shortfall(runs):
    verified = VerifiedHits(MEAN)
    since = {FIRST: [], SECOND: []}  # the oracle: all hits of a window since its last shortfall
    for window, values in runs:
        since[window] += values
        found = verified.add(window, values)
        assert found == find_shortfall([round(value, 6) for value in since[window]], MEAN)
        if found:
            assert window not in verified.new
            since[window] = []


def test_hits_older_than_the_window_are_forgotten():
    verified = VerifiedHits(MEAN)
    assert verified.add(FIRST, [0.9] * 2) is None
    assert verified.add(FIRST, [1.0] * 998) is None
    assert verified._all[FIRST][0] == 0.9
    assert verified.add(FIRST, [1.0] * 2) is None
    assert list(verified._all[FIRST]) == [1.0] * 1000


@pytest.mark.parametrize("other", [SECOND, replace(FIRST, band=Band.UNUSUAL), replace(FIRST, steps=1)])
def test_windows_do_not_affect_each_other(other):
    verified = VerifiedHits(MEAN)
    assert verified.add(FIRST, [0.5] * 4) is None
    assert verified.add(other, [0.5] * 4) is None
    assert verified.add(other, [1.0] * 2000) is None
    assert verified.add(FIRST, [0.5]) == Shortfall(5, 0.5, 0, True)


def test_earlier_hits_and_hits_of_other_servers_count_too():
    verified = VerifiedHits(MEAN)
    assert verified.add(FIRST, [0.5] * 2) is None
    assert list(verified.new[FIRST]) == [0.5] * 2
    verified.restart_from({FIRST: [0.5] * 4})
    assert verified.new == {}
    assert verified.add(FIRST, [0.5]) == Shortfall(5, 0.5, 0, True)


def test_fidelities_that_are_kept_are_numbers_from_minus_1_to_1_with_few_digits():
    verified = VerifiedHits(NONE)
    verified.add(FIRST, [1.0000001, math.nan, -1.0000001, 0.12345678])
    assert list(verified.new[FIRST]) == [1.0, -1.0, -1.0, 0.123457]


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
