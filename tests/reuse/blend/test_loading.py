"""How much to compute again beside loading, and on which device to save."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.reuse.blend.loading import (
    USUAL_RATIO,
    Device,
    cheapest_device,
    cost_per_hour,
    ratio_beside_loading,
)

TOKEN_BYTES, PREFILL_SPEED = 2_000_000, 1000.0


@pytest.mark.parametrize(
    ("load_speed", "least", "loaded", "tokens", "expected"),
    [
        (2e9, 0.15, 100, 100, 1.0),  # loading takes as long as computing everything
        (4e9, 0.15, 100, 100, 0.5),
        (4e9, 0.15, 50, 100, 0.25),  # the other half is in memory
        (20e9, 0.15, 100, 100, 0.15),  # 0.1 would cost nothing, and quality needs more
        (20e9, 0.0, 100, 100, 0.1),
        (200e6, 0.15, 100, 100, 1.0),  # loading is slower than computing everything
        (4e9, 0.15, 0, 100, 0.15),  # nothing is loaded
        (4e9, 0.15, 100, 0, 0.15),  # nothing is left to compute again
        (4e9, 1.0, 10, 100, 1.0),
    ],
)
def test_the_share_is_the_largest_that_costs_no_time_and_at_least_what_quality_needs(
    load_speed, least, loaded, tokens, expected
):
    load_seconds = TOKEN_BYTES * loaded / load_speed
    assert ratio_beside_loading(least, load_seconds, PREFILL_SPEED, tokens) == pytest.approx(expected)


@given(
    least=st.floats(0, 1),
    loaded=st.integers(0, 10_000),
    more=st.integers(0, 10_000),
    load_speed=st.floats(1e6, 1e12),
)
def test_computing_the_share_again_takes_no_longer_than_loading_unless_quality_needs_it(
    least, loaded, more, load_speed
):
    load_seconds, tokens = TOKEN_BYTES * loaded / load_speed, loaded + more
    ratio = ratio_beside_loading(least, load_seconds, PREFILL_SPEED, tokens)
    assert least <= ratio <= 1
    if ratio > least:
        assert ratio * tokens / PREFILL_SPEED <= load_seconds * (1 + 1e-9)


CHEAP = Device("/cheap", 1e9, 0.01)
MIDDLE = Device("/middle", 20e9, 0.05)
ALSO_MIDDLE = Device("/also-middle", 30e9, 0.05)
FAST = Device("/fast", 100e9, 0.5)
# A token's share of 0.15 is computed in 0.15 ms, in which 13.3 GB/s load 2 MB.


@pytest.mark.parametrize(
    ("devices", "ratio", "expected", "is_hidden"),
    [
        ([CHEAP, MIDDLE, FAST], USUAL_RATIO, MIDDLE, True),
        ([FAST, MIDDLE, CHEAP], USUAL_RATIO, MIDDLE, True),
        ([MIDDLE, ALSO_MIDDLE], USUAL_RATIO, ALSO_MIDDLE, True),  # the faster one of two that cost the same
        ([CHEAP, FAST], USUAL_RATIO, FAST, True),
        ([CHEAP], USUAL_RATIO, CHEAP, False),
        ([CHEAP, MIDDLE, FAST], 0.01, FAST, False),  # none is fast enough: the fastest
        ([CHEAP, MIDDLE, FAST], 0.02, FAST, True),  # just fast enough
        ([CHEAP, MIDDLE, FAST], 1.0, MIDDLE, True),
    ],
)
def test_the_cheapest_device_that_hides_its_loading_is_chosen(devices, ratio, expected, is_hidden):
    assert cheapest_device(devices, TOKEN_BYTES, PREFILL_SPEED, ratio) == (expected, is_hidden)


def test_without_devices_there_is_nothing_to_choose():
    with pytest.raises(ValueError, match="no device"):
        cheapest_device([], TOKEN_BYTES, PREFILL_SPEED)


@pytest.mark.parametrize(
    ("cost", "token_bytes", "tokens", "expected"),
    [(0.05, 2_000_000, 1000, 0.1), (0.05, 2_000_000, 0, 0.0), (0.0, 2_000_000, 1000, 0.0)],
)
def test_cost_grows_with_bytes_and_price(cost, token_bytes, tokens, expected):
    assert cost_per_hour(Device("/", 1e9, cost), token_bytes, tokens) == pytest.approx(expected)
