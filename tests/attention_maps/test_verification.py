"""A length group is found below the budget exactly when the mean of its last verified hits is."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.attention_maps.verification import Shortfall, VerifiedHits

LEAST = 0.985
GROUPS = 3

# Eighths sum exactly, so that the oracle's mean is the very same number.
fidelities = st.integers(0, 8).map(lambda eighths: eighths / 8)
runs = st.tuples(st.integers(0, GROUPS - 1), st.lists(fidelities, max_size=70))


@given(runs=st.lists(runs, max_size=20), least=fidelities)
def test_shortfall_comes_exactly_when_the_last_200_since_the_one_before_are_too_low(runs, least):
    verified = VerifiedHits(GROUPS, least)
    since = [[] for _ in range(GROUPS)]  # all hits of a group since its last shortfall: the oracle
    for place, values in runs:
        since[place] += values
        last = since[place][-200:]
        expected = None
        if len(last) >= 50 and np.mean(last) < least:
            expected = Shortfall(np.mean(last), len(last))
            since[place] = []
        assert verified.note(place, values) == expected


@given(count=st.integers(0, 49), value=fidelities)
def test_fewer_than_fifty_say_nothing(count, value):
    assert VerifiedHits(1, least=2.0).note(0, [value] * count) is None


def test_fifty_bad_ones_are_enough_whether_they_come_together_or_singly():
    together, singly = VerifiedHits(1, LEAST), VerifiedHits(1, LEAST)
    assert together.note(0, [0.5] * 50) == Shortfall(0.5, 50)
    assert [singly.note(0, [0.5]) for _ in range(50)] == [None] * 49 + [Shortfall(0.5, 50)]


def test_hits_older_than_the_window_are_forgotten():
    verified = VerifiedHits(1, LEAST)
    assert verified.note(0, [1.0] * 1000) is None
    # 200 hits of which n have 0.9 fall below when n * 0.1 / 200 > 0.015.
    found = [verified.note(0, [0.9]) for _ in range(31)]
    assert found[:30] == [None] * 30
    assert found[30] == Shortfall(pytest.approx(0.9845), 200)


def test_groups_are_apart():
    verified = VerifiedHits(2, LEAST)
    assert verified.note(0, [0.5] * 49) is None
    assert verified.note(1, [0.5] * 49) is None
    assert verified.note(1, [1.0] * 2000) is None
    assert verified.note(0, [0.5]) == Shortfall(0.5, 50)


def test_window_starts_anew_after_a_shortfall():
    verified = VerifiedHits(1, LEAST)
    assert verified.note(0, [0.5] * 50) is not None
    assert verified.note(0, [1.0] * 50) is None


def test_result_that_is_no_number_is_too_low():
    shortfall = VerifiedHits(1, LEAST).note(0, [1.0] * 60 + [math.nan])
    assert shortfall is not None
    assert math.isnan(shortfall.mean)
