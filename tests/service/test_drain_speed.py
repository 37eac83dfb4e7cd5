import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.batching.admission import DrainSpeed

ROUND = 100
batches = st.lists(st.integers(ROUND, 300), min_size=3, max_size=30)


def measured(sizes, seconds, threads=1):
    """Let threads compute batches of these sizes, each in these seconds, while others wait all the time."""
    speed = DrainSpeed(ROUND * threads)
    free_at = [0.0] * threads
    ends = []
    speed.note(0, 0.0, others_wait=True)
    for size, took in zip(sizes, seconds, strict=True):
        thread = free_at.index(min(free_at))
        free_at[thread] += took
        ends.append((free_at[thread], size))
    for now, size in sorted(ends):
        speed.note(size, now, others_wait=True)
    return speed.tokens_per_second


@given(sizes=batches)
def test_speed_of_batches_of_any_size_is_the_speed_of_their_tokens(sizes):
    assert measured(sizes, [size / 5 for size in sizes]) == pytest.approx(5)


def test_small_batches_make_a_round_together():
    assert measured([30] * 40, [6.0] * 40) == pytest.approx(5)


@given(threads=st.integers(1, 8))
def test_threads_that_compute_at_the_same_time_add_up(threads):
    found = measured([ROUND] * 20 * threads, [2.0] * 20 * threads, threads)
    assert found == pytest.approx(threads * ROUND / 2.0)


def test_nothing_is_known_after_a_few_batches():
    assert measured([ROUND] * 2, [9.0] * 2) is None
    assert measured([ROUND] * 3, [9.0] * 3) is not None


def test_one_stall_changes_nothing():
    assert measured([ROUND] * 9, [1.0] * 4 + [1000.0] + [1.0] * 4) == ROUND


def test_speed_follows_the_last_batches():
    assert measured([ROUND] * 40, [1.0] * 20 + [4.0] * 20) == ROUND / 4


def test_batches_that_nothing_waits_behind_do_not_count():
    speed = DrainSpeed(ROUND)
    now = 0.0
    for _ in range(10):
        speed.note(0, now, others_wait=True)
        now += 1
        speed.note(ROUND, now, others_wait=False)
        now += 50  # nothing waits
        speed.note(0, now, others_wait=False)  # a small batch begins
        now += 50
        speed.note(1, now, others_wait=False)
    assert speed.tokens_per_second == ROUND
