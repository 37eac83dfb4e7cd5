"""How much tokens deviate, which ones are picked, and how many each layer computes."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.reuse.blend.chunks import BlendReport, ChunkReport, Recomputation, deviations
from benchmarks.papers.blending import RandomTokens

USUAL, RANDOM = Recomputation(0.1), RandomTokens(0.1)


def slots(rows, dtype=torch.float32):
    """Rows of numbers as the store holds them, uint8 [rows, bytes]."""
    return torch.tensor(rows, dtype=torch.float32).to(dtype).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([[1, 2, 3, 4]], [[1, 2, 3, 4]], [0]),
        ([[1, 2], [3, 4]], [[1, 4], [0, 8]], [4, 25]),
        ([[0, 0, 0]], [[-1, 2, -2]], [9]),
        ([[float("nan"), 0], [0, float("inf")]], [[0, 0], [1, 0]], [np.inf, np.inf]),
        ([[float("inf"), 0]], [[float("inf"), 0]], [np.inf]),
    ],
)
def test_deviation_is_the_squared_distance_and_infinite_where_it_is_not_finite(dtype, one, other, expected):
    found = deviations(slots(one, dtype), slots(other, dtype), dtype)
    assert found.dtype == np.float32
    assert found.tolist() == expected
    assert deviations(slots(other, dtype), slots(one, dtype), dtype).tolist() == expected


def test_deviation_sums_in_float32_whatever_the_type_of_the_slots():
    # In bfloat16, a sum of 300 ones stays at 256.
    found = deviations(slots([[1] * 300], torch.bfloat16), slots([[0] * 300], torch.bfloat16), torch.bfloat16)
    assert found.tolist() == [300]


@pytest.mark.parametrize(
    ("deviation", "count", "expected"),
    [
        ([1, 5, 3, 4], 2, [1, 3]),
        ([1, 5, 3, 4], 0, []),
        ([1, 5, 3, 4], 4, [0, 1, 2, 3]),
        ([2, 2, 2, 2], 3, [0, 1, 2]),
        ([1, 2, 2, 2], 2, [1, 2]),
        ([0, np.inf, 7, np.inf], 2, [1, 3]),
        ([], 0, []),
    ],
)
def test_the_largest_deviations_are_picked_in_order_of_position(deviation, count, expected):
    assert USUAL.picked(np.array(deviation, dtype=np.float32), count).tolist() == expected


@given(st.lists(st.floats(0, 100, width=32), max_size=40), st.data())
def test_picks_of_fewer_tokens_are_among_the_picks_of_more(deviation, data):
    values = np.array(deviation, dtype=np.float32)
    more = data.draw(st.integers(0, len(values)))
    fewer = data.draw(st.integers(0, more))
    for recomputation in (USUAL, RANDOM):
        many, few = (recomputation.picked(values, count) for count in (more, fewer))
        assert len(many) == more
        assert {*few.tolist()} <= {*many.tolist()}
        assert all(one < other for one, other in pairwise(many.tolist()))
    rest = np.delete(values, USUAL.picked(values, more))
    if more and len(rest):
        assert values[USUAL.picked(values, more)].min() >= rest.max()


def test_random_picks_do_not_depend_on_deviations_and_repeat():
    rising, falling = np.arange(50, dtype=np.float32), np.arange(50, 0, -1, dtype=np.float32)
    one, other = (RANDOM.picked(values, 10).tolist() for values in (rising, falling))
    assert one == other
    assert one not in (list(range(10)), list(range(40, 50)))


@pytest.mark.parametrize(
    ("recomputation", "tokens", "layers", "expected"),
    [
        (Recomputation(0.0), 100, 4, [0, 0, 0, 0]),
        (Recomputation(1.0), 100, 4, [100, 100, 100, 100]),
        (Recomputation(0.2), 100, 5, [100, 20, 20, 20, 20]),
        (Recomputation(0.2, fall=0.3), 100, 6, [100, 25, 25, 17, 17, 17]),
        (Recomputation(0.2, fall=0.3), 100, 10, [100, 25, 25, 25, 20, 20, 20, 16, 16, 16]),
        (Recomputation(0.2, fall=0.0), 100, 4, [100, 20, 20, 20]),
        (Recomputation(0.2, 2, fall=0.3), 100, 8, [100, 100, 24, 24, 24, 17, 17, 17]),
        (Recomputation(0.2, 3), 100, 4, [100, 100, 100, 20]),
        (Recomputation(0.2, 4), 100, 4, [100, 100, 100, 100]),
        (Recomputation(0.2, 9), 100, 4, [100, 100, 100, 100]),
        # The fall begins at the whole, and the share of a step is that of its middle.
        (Recomputation(0.8, fall=0.3), 100, 9, [100, *[92] * 4, *[69] * 4]),
        (Recomputation(0.15), 10, 2, [10, 2]),
        (Recomputation(0.01), 10, 4, [10, 1, 1, 1]),  # not none
        (Recomputation(0.5), 0, 4, [0, 0, 0, 0]),
        # The only layer comes before the check, and computes everything.
        (Recomputation(0.2), 100, 1, [100]),
        (Recomputation(0.0), 100, 1, [100]),
        (Recomputation(0.2), 100, 2, [100, 20]),
    ],
    ids=str,
)
def test_layers_compute_as_many_tokens_as_in_this_table(recomputation, tokens, layers, expected):
    assert recomputation.counts(tokens, layers) == expected


@given(
    ratio=st.floats(0, 1),
    check_layer=st.integers(1, 6),
    fall=st.floats(0, 1),
    tokens=st.integers(0, 5000),
    layers=st.integers(2, 40),
)
def test_counts_never_grow_and_their_mean_is_the_ratio(ratio, check_layer, fall, tokens, layers):
    counts = Recomputation(ratio, check_layer, fall).counts(tokens, layers)
    assert len(counts) == layers
    assert all(0 <= other <= one <= tokens for one, other in pairwise(counts))
    later = counts[check_layer:]
    if later:
        assert ratio * tokens - 1e-6 <= np.mean(later) <= ratio * tokens + 1
    if ratio and check_layer < layers:
        assert counts[0] == tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": -0.1}, "between 0 and 1"),
        ({"ratio": 1.1}, "between 0 and 1"),
        ({"ratio": float("nan")}, "between 0 and 1"),
        ({"ratio": 0.5, "fall": 1.1}, "fall lies between 0 and 1"),
        ({"ratio": 0.5, "fall": -0.1}, "fall lies between 0 and 1"),
        ({"ratio": 0.5, "fall": float("nan")}, "fall lies between 0 and 1"),
        ({"ratio": 0.5, "check_layer": 0}, "1 or later"),
        ({"ratio": 0.5, "check_layer": -1}, "1 or later"),
    ],
    ids=str,
)
def test_impossible_recomputations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Recomputation(**changes)


def test_tokens_are_used_as_stored_or_computed_again_or_new():
    report = BlendReport(
        chunks=(
            ChunkReport(tokens=20, cached=20, recomputed=0),
            ChunkReport(tokens=30, cached=30, recomputed=12),
            ChunkReport(tokens=10, cached=0, recomputed=4),
            ChunkReport(tokens=25, cached=16, recomputed=25),
        ),
        exact_tokens=20,
        rows=(5,),
        is_exact=False,
    )
    assert report.tokens_by_state() == (20 + 18, 12 + 16, 10 + 9)
