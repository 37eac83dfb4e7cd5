"""Pairs of passes: median, bounds, and which pairs count. Time is simulated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from attncache_core.calibration import paired
from attncache_core.calibration.paired import PAIRS, compare
from attncache_core.errors import MachineBusy

AT_A_LOOK = 0.05 / 4  # the chance that one look finds a bound beyond the true median
LIMIT = -math.inf  # leaves nothing open


class Machine:
    """A clock that only passes move. The process waits for the processors as often as `waits` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.waited = 0.0
        self.slept: list[float] = []
        self.order: list[str] = []
        monkeypatch.setattr(paired.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(paired.time, "sleep", self.slept.append)
        monkeypatch.setattr(paired, "waited_seconds", lambda: self.waited)

    def way(self, name: str, *seconds: float, waits: float = 0.0):
        """Return a way to compute that takes these seconds in turn."""
        turns = iter(range(10**9))

        def run() -> None:
            taken = seconds[next(turns) % len(seconds)]
            self.now += taken
            self.waited += waits * taken
            self.order.append(name)

        return run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_gain_is_the_median_of_the_pairs_and_the_bounds_enclose_it(machine: Machine) -> None:
    gain = compare([(machine.way("a", 1.2), machine.way("b", 1.0))], LIMIT)
    assert (gain.median, gain.lower, gain.upper) == pytest.approx((0.2, 0.2, 0.2))
    assert gain.saved_seconds == pytest.approx(0.2)
    noisy = compare([(machine.way("a", *np.linspace(1.0, 1.4, 25)), machine.way("b", 1.0))], LIMIT)
    assert noisy.lower < noisy.median < noisy.upper


def test_ways_and_batches_alternate(machine: Machine) -> None:
    batches = [tuple(machine.way(f"{name}{way}", 1.0) for way in "12") for name in "xy"]
    compare(batches, LIMIT, pairs=4)
    warm_up, turns = machine.order[:4], machine.order[4:]
    assert warm_up == ["x1", "x2", "y1", "y2"]
    assert turns == ["x1", "x2", "y1", "y2", "x2", "x1", "y2", "y1"]


def test_pairs_are_added_while_the_bounds_leave_the_limit_open(machine: Machine) -> None:
    passes = (machine.way("a", *np.linspace(1.0, 1.4, 25)), machine.way("b", 1.0))
    first = compare([passes], LIMIT)
    assert first.leaves_open(0.2)
    machine.order.clear()
    more = compare([passes], 0.2)
    assert machine.order.count("a") == 1 + paired._MAX_LOOKS * PAIRS  # the first pass does not count
    assert first.lower < more.lower < 0.2 < more.upper < first.upper


def test_machine_that_others_use_all_the_time_is_busy(machine: Machine) -> None:
    with pytest.raises(MachineBusy, match="busy or limited"):
        compare([(machine.way("a", 1.5, waits=0.2), machine.way("b", 1.0))], LIMIT)


def test_pairs_in_which_others_used_the_processors_do_not_count(machine: Machine) -> None:
    disturbed = machine.way("b", 9.0, waits=0.5)
    alone = machine.way("b", 1.0)
    ways = iter([alone, *[disturbed, alone] * PAIRS])
    gain = compare([(machine.way("a", 1.1), lambda: next(ways)())], LIMIT)
    assert gain.lower == pytest.approx(0.1)


def test_pairs_in_which_a_request_came_do_not_count_and_are_repeated_later(machine: Machine) -> None:
    # None: a request is computed. A number that has changed: a request came and went.
    marks = iter([None, None, 1, 2, *[2] * 2 * PAIRS])
    slow_first = machine.way("b", 1.0, 9.0, *[1.0] * PAIRS)
    gain = compare([(machine.way("a", 1.1), slow_first)], LIMIT, lambda: next(marks))
    assert (gain.lower, gain.upper) == pytest.approx((0.1, 0.1))
    assert machine.slept == [paired._SECONDS_BETWEEN_LOOKS] * 2 + [paired._SECONDS_AFTER_REQUEST]


@given(st.lists(st.floats(-0.9, 9), min_size=1, max_size=60))
def test_bounds_are_the_sign_tests(gains: list[float]) -> None:
    found = paired._with_bounds(gains)
    below = sum(gain < found.lower for gain in gains)
    if math.isinf(found.lower):
        # Even the smallest gain is above the true median too often.
        assert binom.cdf(0, len(gains), 0.5) > AT_A_LOOK
        return
    assert binom.cdf(below, len(gains), 0.5) <= AT_A_LOOK or gains.count(found.lower) > 1
    assert found.lower <= found.median <= found.upper
    mirrored = paired._with_bounds([-gain for gain in gains])
    assert (mirrored.lower, mirrored.upper) == (-found.upper, -found.lower)


def test_lower_bound_is_above_the_true_median_in_at_most_one_of_twenty_measurements(machine: Machine) -> None:
    random = np.random.default_rng(0)
    # Skewed noise, as other programs make it: passes only become slower.
    samples = 1 + random.exponential(0.1, (1000, 1 + paired._MAX_LOOKS * PAIRS)) - 0.1 * np.log(2)
    # A limit at the true median keeps the question open, so that all four looks are taken.
    found = [compare([(machine.way("a", *sample), machine.way("b", 1.0))], 0.0) for sample in samples]
    assert 0.01 < np.mean([gain.lower >= 0 for gain in found]) < 0.05
