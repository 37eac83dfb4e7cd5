"""Products of V with reused maps, square or packed as lower triangles."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_formulas import (
    CANARY,
    addresses,
    apply_maps,
    assert_near,
    band_of,
    bands,
    canaries,
    dtypes,
    joined_projection,
    made_maps,
    map_dtypes,
    offsets_of,
    products,
    reaches,
    run_starts,
    threads,
    widths,
)


def packed(maps):
    """Return the lower triangles of maps [heads, L, L], row by row."""
    return maps[:, torch.ones(maps.shape[1:], dtype=torch.bool).tril()]


@settings(max_examples=100)
@given(
    runs=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 3)), min_size=1, max_size=4),
    heads=st.integers(1, 5),
    width=widths,
    dtype=dtypes,
    map_dtype=map_dtypes,
    before=reaches,
    count=st.sampled_from([1, 2]),
)
@example([(199, 3), (1, 2), (17, 1), (32, 3)], 3, 32, torch.bfloat16, torch.bfloat16, None, 2)
def test_packed_maps_equal_square_maps_bit_for_bit(
    kernel, runs, heads, width, dtype, map_dtype, before, count
):
    run_lengths, copies = map(list, zip(*runs, strict=True))
    lengths = np.repeat(run_lengths, copies).tolist()
    _, _, value = joined_projection(sum(lengths), heads, width, dtype, seed=sum(lengths))
    made = [
        maps.masked_fill(~band_of(maps.shape[1], before, 0), 0)
        for maps in made_maps(run_lengths, heads, map_dtype)
    ]
    maps = [square for square, number in zip(made, copies, strict=True) for _ in range(number)]
    triangles = [packed(square) for square in made]
    shared = [triangle for triangle, number in zip(triangles, copies, strict=True) for _ in range(number)]
    offsets = offsets_of(lengths)
    with threads(count):
        square, stopped, from_triangles, from_bands = (
            apply_maps(kernel, held, run_starts(copies), value, offsets, **more)
            for held, more in (
                (maps, {}),
                (maps, {"before": before, "after": 0}),
                (shared, {"packed": True}),
                (shared, {"packed": True, "before": before}),
            )
        )
    assert_near(square, *products(maps, value, offsets))
    assert torch.equal(stopped, square)
    assert torch.equal(from_triangles, square)
    assert torch.equal(from_bands, square)


@settings(max_examples=40)
@given(length=st.integers(1, 200), band=bands, width=widths, dtype=dtypes, map_dtype=map_dtypes)
def test_skipping_zeros_outside_a_band_changes_no_bit(kernel, length, band, width, dtype, map_dtype):
    _, _, value = joined_projection(length, 2, width, dtype, seed=length)
    before, after = band
    (made,) = made_maps([length], 2, map_dtype)
    maps = [made.masked_fill(~band_of(length, before, after), 0)]
    offsets, runs = offsets_of([length]), np.arange(2)
    whole = apply_maps(kernel, maps, runs, value, offsets)
    assert torch.equal(apply_maps(kernel, maps, runs, value, offsets, before=before, after=after), whole)


@settings(max_examples=60)
@given(
    runs=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 3)), min_size=1, max_size=4),
    heads=st.integers(1, 6),
    width=widths,
    dtype=dtypes,
    map_dtype=map_dtypes,
    count=st.sampled_from([1, 2]),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
)
@example([(199, 3), (1, 2), (17, 1), (32, 3)], 6, 32, torch.bfloat16, torch.bfloat16, 2, 0, 1)
@example([(7, 2), (8, 1), (9, 3)], 3, 64, torch.bfloat16, torch.float16, 1, 2, 0)
def test_reused_maps_are_multiplied_by_their_values_and_nothing_else_is_written(
    kernel, runs, heads, width, dtype, map_dtype, count, before, after
):
    run_lengths, copies = map(list, zip(*runs, strict=True))
    lengths = np.repeat(run_lengths, copies).tolist()
    tokens = before + sum(lengths) + after
    *_, value = joined_projection(tokens, heads, width, dtype, seed=sum(lengths))
    offsets = offsets_of(lengths, first=before)
    made = made_maps(run_lengths, heads, map_dtype)
    maps = [square for square, number in zip(made, copies, strict=True) for _ in range(number)]
    whole, context = canaries(tokens, heads, width, dtype)
    with threads(count):
        kernel.apply_maps(addresses(maps), map_dtype, run_starts(copies), value, offsets, context)
    # Only the result is rounded, because maps from records are multiplied without rounding.
    assert_near(context[before : tokens - after], *products(maps, value, offsets))
    assert (whole[:, [0, -1]] == CANARY).all()
    assert (whole[:before] == CANARY).all()
    assert (whole[tokens - after :] == CANARY).all()


@settings(max_examples=30)
@given(
    length=st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 199])),
    copies=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    width=widths,
    dtype=dtypes,
    map_dtype=map_dtypes,
)
def test_runs_that_share_a_record_equal_single_sequences_bit_for_bit(
    kernel, length, copies, width, dtype, map_dtype
):
    heads = 2
    lengths = [length] * sum(copies)
    *_, value = joined_projection(sum(lengths), heads, width, dtype)
    made = made_maps([length] * len(copies), heads, map_dtype)
    maps = [square for square, number in zip(made, copies, strict=True) for _ in range(number)]
    offsets = offsets_of(lengths)
    shared = apply_maps(kernel, maps, run_starts(copies), value, offsets)
    separate = apply_maps(kernel, maps, np.arange(len(lengths) + 1), value, offsets)
    alone = [
        apply_maps(kernel, [square], np.arange(2), value[first:end], offsets_of([length]))
        for square, (first, end) in zip(maps, pairwise(offsets.tolist()), strict=True)
    ]
    assert torch.equal(shared, separate)
    assert torch.equal(shared, torch.cat(alone))


def test_a_run_uses_the_maps_of_its_first_sequence(kernel):
    # The addresses of the other sequences of a run are invalid and must not be read.
    *_, value = joined_projection(27, 1, 32, torch.float32)
    maps = made_maps([9], 1, torch.bfloat16)
    sources = np.array([maps[0].data_ptr(), 0, 0], dtype=np.uint64)
    context = torch.zeros_like(value)
    kernel.apply_maps(sources, torch.bfloat16, np.array([0, 3]), value, offsets_of([9] * 3), context)
    assert_near(context, *products(maps * 3, value, offsets_of([9] * 3)))
