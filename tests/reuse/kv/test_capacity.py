"""Sizes and prices against the figures of the papers; distinct sessions against brute force."""

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.reuse.kv.capacity import (
    CapacityPlan,
    DistinctSessions,
    kv_bytes,
    read_buffer_bytes,
    window_length,
)

MIB = 2**20
GB = 10**9


def example_plan(**changes):
    """LLaMA-13B in the configuration of CachedAttention's evaluation: 128 GB of memory, 10 TB of SSD."""
    values = {
        "bytes_per_token": 819_200,
        "context_window": 4096,
        "memory_bytes": 128 * GB,
        "disk_bytes": 10_000 * GB,
        "distinct_sessions": 3600,
    }
    return CapacityPlan(**(values | changes))


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "tokens", "mebibytes"),
    [
        pytest.param(12, 12, 64, 1024, 36, id="GPT-2"),
        pytest.param(96, 96, 128, 2048, 9216, id="GPT-3"),
        pytest.param(32, 32, 128, 4096, 2048, id="LLaMA-7B"),
        pytest.param(80, 64, 128, 4096, 10240, id="LLaMA-70B-with-64-heads"),
    ],
)
def test_kv_bytes_are_those_of_the_table_of_kv_cache_explained(layers, heads, head_dim, tokens, mebibytes):
    assert kv_bytes(layers, heads, head_dim, 2, tokens) == mebibytes * MIB


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "mebibytes"),
    [
        pytest.param(80, 64, 128, 2.5, id="LLaMA-65B"),
        pytest.param(40, 40, 128, 0.78, id="LLaMA-13B"),
        pytest.param(80, 8, 128, 0.31, id="LLaMA-70B-grouped-by-8"),
        pytest.param(60, 8, 64, 0.12, id="Falcon-40B-grouped-by-16"),
    ],
)
def test_bytes_per_token_are_those_of_cached_attention(layers, kv_heads, head_dim, mebibytes):
    assert round(kv_bytes(layers, kv_heads, head_dim, 2) / MIB, 2) == mebibytes


def test_grouped_queries_divide_the_bytes_by_the_size_of_the_group():
    assert kv_bytes(32, 32, 128, 2, 100) == 4 * kv_bytes(32, 8, 128, 2, 100)


@pytest.mark.parametrize(
    ("capacity", "session", "length"),
    [(10, 5, 2), (9.9, 5, 1), (4, 5, 0), (0, 5, 0), (-3, 5, 0), (10, 2.5, 4)],
)
def test_a_window_is_as_long_as_the_sessions_that_fit(capacity, session, length):
    assert window_length(capacity, session) == length


@pytest.mark.parametrize("session_bytes", [0, -1])
def test_a_window_of_sessions_without_bytes_is_refused(session_bytes):
    with pytest.raises(ValueError, match="session_bytes"):
        window_length(10, session_bytes)


def test_the_read_buffer_holds_what_loads_during_the_gap():
    # Loading takes 1000 · 2 ms = 2 s, the prefill 100 · 5 ms = 0.5 s: at 10 MB/s the gap of 1.5 s is 15 MB.
    assert read_buffer_bytes(10e6, 0.002, 1000, 0.005, 100) == 15_000_000


def test_a_perfect_overlap_needs_no_read_buffer():
    assert read_buffer_bytes(26e9, 0.001, 1000, 0.01, 100) == 0


@given(st.floats(1, 1e11), st.floats(0, 1), st.integers(0, 10_000), st.floats(0, 1), st.integers(0, 10_000))
def test_the_read_buffer_is_positive_only_if_loading_is_the_slower_part(
    bandwidth, load_seconds, history_tokens, prefill_seconds, new_tokens
):
    size = read_buffer_bytes(bandwidth, load_seconds, history_tokens, prefill_seconds, new_tokens)
    assert size >= 0
    if load_seconds * history_tokens <= prefill_seconds * new_tokens:
        assert size == 0


def test_a_plan_counts_the_sessions_that_fit():
    # One session: 4096 · 819,200 bytes = 3.355 GB. 128 / 3.355 = 38.1; 10,000 / 3.355 = 2980.2.
    plan = example_plan()
    assert plan.session_bytes == 3_355_443_200
    assert (plan.memory_sessions, plan.disk_sessions, plan.sessions) == (38, 2980, 3018)


def test_sessions_may_use_what_is_left_of_both_tiers():
    plan = example_plan(bytes_per_token=1, context_window=4, memory_bytes=6, disk_bytes=6)
    assert (plan.memory_sessions, plan.disk_sessions, plan.sessions) == (1, 1, 3)


def test_a_plan_compares_its_capacity_with_that_of_all_distinct_sessions():
    plan = example_plan()
    assert plan.full_bytes == 3600 * 3_355_443_200
    assert plan.capacity_ratio == pytest.approx(0.8384, abs=1e-4)


def test_a_plan_without_sessions_has_no_ratio():
    assert example_plan(distinct_sessions=0).capacity_ratio is None


def test_a_plan_reports_the_cost_at_the_prices_of_cached_attention():
    # 128 GB · $0.0088 + 10,000 GB · $0.000082
    plan = example_plan(memory_price=0.0088, disk_price=0.000082)
    assert plan.memory_cost == pytest.approx(1.1264)
    assert plan.disk_cost == pytest.approx(0.82)
    assert plan.cost == pytest.approx(1.9464)


@pytest.mark.parametrize("prices", [{}, {"memory_price": 0.0088}, {"disk_price": 0.000082}])
def test_a_plan_without_all_prices_has_no_total_cost(prices):
    plan = example_plan(**prices)
    assert plan.cost is None
    assert (plan.memory_cost is None, plan.disk_cost is None) == (
        "memory_price" not in prices,
        "disk_price" not in prices,
    )


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_a_session_counts_once_and_until_the_window_has_passed_since_its_last_use():
    clock = Clock()
    sessions = DistinctSessions(60, clock)
    for clock.seconds, session in [(0, "a"), (10, "b"), (30, "a")]:
        sessions.used(session)
    counts = {}
    for clock.seconds in (30, 69, 70, 89, 90):
        counts[clock.seconds] = sessions.count()
    assert counts == {30: 2, 69: 2, 70: 1, 89: 1, 90: 0}


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
