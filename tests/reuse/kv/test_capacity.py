"""Sizes and prices against the figures of the papers; distinct sessions against brute force."""

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.reuse.kv.capacity import CapacityPlan, DistinctSessions

GB = 10**9
SESSIONS = ("memory_sessions", "disk_sessions", "sessions")


def example_plan(**changes):
    """LLaMA-13B as CachedAttention's evaluation runs it: 128 GB of memory, 10 TB of SSD."""
    values = {
        "bytes_per_token": 819_200,
        "context_window": 4096,
        "memory_bytes": 128 * GB,
        "disk_bytes": 10_000 * GB,
        "distinct_sessions": 3600,
    }
    return CapacityPlan(**(values | changes)).figures()


def test_a_plan_has_the_sessions_the_ratio_and_the_cost_of_the_paper():
    plan = example_plan(memory_price=0.0088, disk_price=0.000082)
    # One session: 4096 · 819,200 bytes = 3.355 GB. 128 / 3.355 = 38.1; 10,000 / 3.355 = 2980.2.
    assert plan["session_bytes"] == 3_355_443_200
    assert [plan[name] for name in SESSIONS] == [38, 2980, 3018]
    assert plan["full_bytes"] == 3600 * 3_355_443_200
    assert plan["capacity_ratio"] == pytest.approx(0.8384, abs=1e-4)
    assert example_plan(distinct_sessions=0)["capacity_ratio"] is None
    # 128 GB · $0.0088 + 10,000 GB · $0.000082
    costs = [plan[name] for name in ("memory_cost", "disk_cost", "cost")]
    assert costs == pytest.approx([1.1264, 0.82, 1.9464])


def test_sessions_may_use_what_is_left_of_both_tiers():
    plan = example_plan(bytes_per_token=1, context_window=4, memory_bytes=6, disk_bytes=6)
    assert [plan[name] for name in SESSIONS] == [1, 1, 3]


@pytest.mark.parametrize("prices", [{}, {"memory_price": 0.0088}, {"disk_price": 0.000082}])
def test_a_plan_without_all_prices_has_no_total_cost(prices):
    plan = example_plan(**prices)
    assert plan["cost"] is None
    assert (plan["memory_cost"] is None, plan["disk_cost"] is None) == (
        "memory_price" not in prices,
        "disk_price" not in prices,
    )


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_a_session_of_an_earlier_window_takes_no_memory():
    class Session:
        pass

    clock, session = Clock(), Session()
    sessions, reference = DistinctSessions(60, clock), weakref.ref(session)
    sessions.used(session)
    del session
    clock.seconds = 60
    sessions.used("another")
    assert reference() is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=50))
def test_distinct_sessions_agree_with_brute_force(uses):
    clock, window_seconds = Clock(), 7
    sessions, history = DistinctSessions(window_seconds, clock), []
    for pause, session in uses:
        clock.seconds += pause
        sessions.used(session)
        history.append((clock.seconds, session))
        recent = {session for seconds, session in history if clock.seconds - seconds < window_seconds}
        assert sessions.count() == len(recent)
