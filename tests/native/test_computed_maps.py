"""Maps that the kernel computes, and their products with V, for bidirectional attention."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_formulas import (
    BFLOAT16,
    CANARY,
    FLOAT32,
    SCALE,
    addresses,
    assert_near,
    attend,
    canaries,
    dtypes,
    joined_projection,
    lengths_of_sequences,
    offsets_of,
    own_maps,
    products,
    rounds_maps,
    threads,
    two_projections,
    widths,
)


@settings(max_examples=60)
@given(
    lengths=lengths_of_sequences,
    heads=st.integers(1, 6),
    width=widths,
    dtype=dtypes,
    count=st.sampled_from([1, 2]),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    between=st.integers(0, 3),
    projected=st.sampled_from([joined_projection, two_projections]),
)
@example([200, 1, 16, 17, 31, 32], 6, 32, torch.bfloat16, 2, 1, 1, 1, joined_projection)
@example([8, 15, 16, 7, 9, 1], 2, 96, torch.float32, 1, 0, 2, 2, two_projections)
def test_context_and_kept_maps_follow_the_formula_and_nothing_else_is_written(
    kernel, lengths, heads, width, dtype, count, before, after, between, projected
):
    tokens = before + sum(lengths) + after
    query, key, value = projected(tokens, heads, width, dtype, seed=sum(lengths))
    offsets = offsets_of(lengths, first=before)
    # The destinations of the maps, with canaries before, between and after them.
    sizes = [heads * length**2 for length in lengths]
    starts = offsets_of([size + between for size in sizes], first=between)[:-1]
    buffer = torch.full((sum(sizes) + between * (len(sizes) + 1),), CANARY, dtype=dtype)
    kept = [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    whole, context = canaries(tokens, heads, width, dtype)
    with threads(count):
        kernel.attend(query, key, value, offsets, SCALE, context, kept=addresses(kept))
        unkept = attend(kernel, query, key, value, offsets)
    assert torch.equal(context, unkept)  # keeping maps does not change the context
    assert (whole[:, [0, -1]] == CANARY).all()
    assert (whole[:before] == CANARY).all()
    assert (whole[tokens - after :] == CANARY).all()
    maps = list(own_maps(query, key, offsets, SCALE))
    rounds = rounds_maps(kernel, dtype, width)
    assert_near(context[before : tokens - after], *products(maps, value, offsets), rounds)
    # If the weights of a row are rounded before the division by their sum, map elements are rounded twice.
    roundings = BFLOAT16 * ((dtype is torch.bfloat16) + rounds)
    for found, exact in zip(kept, maps, strict=True):
        allowed = FLOAT32 + roundings * exact.flatten()
        assert bool(((found.double() - exact.flatten()).abs() <= allowed).all())
        found.fill_(CANARY)
    assert (buffer == CANARY).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("size", [2.0**-60, 2.0**-6, 1.0, 2.0**20, 2.0**50])
def test_scores_of_any_size_neither_overflow_nor_lose_the_softmax(kernel, size, width, dtype):
    # Small integers times a power of two make exact scores, so only the softmax can fail.
    random = torch.Generator().manual_seed(width)
    query, key = (
        (torch.randint(-3, 4, (90, 2, width), generator=random) * size**0.5).to(dtype) for _ in "QK"
    )
    value = torch.randn(90, 2, width, generator=random).to(dtype)
    offsets = offsets_of([1, 40, 49])
    found = attend(kernel, query, key, value, offsets)
    exact, sizes = products(own_maps(query, key, offsets, SCALE), value, offsets)
    assert found.isfinite().all()
    assert_near(found, exact, sizes, rounds_maps(kernel, dtype, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 64])
@pytest.mark.parametrize("token", [0, 15, 16, 36])
def test_one_huge_score_has_the_whole_weight_of_its_row(kernel, token, width, dtype):
    query, key, value = joined_projection(37, 2, width, dtype)
    query, key = query.clone(), key.clone()
    query[20], key[token] = 2.0**40, 2.0**60
    found = attend(kernel, query, key, value, offsets_of([37]))
    assert torch.equal(found[20], value[token])
    assert found.isfinite().all()


def test_row_of_very_negative_scores_is_still_a_softmax(kernel):
    # All scores are far below zero, so the zeros that pad a vector must not count as the maximum.
    query = torch.full((5, 1, 32), 2.0**30)
    key = torch.full((5, 1, 32), -(2.0**30))
    value = torch.arange(5 * 32.0).view(5, 1, 32)
    found = attend(kernel, query, key, value, offsets_of([5]))
    torch.testing.assert_close(found, value.mean(dim=0, keepdim=True).expand(5, 1, 32), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 64])
@pytest.mark.parametrize("token", [0, 15, 16, 36])
def test_nan_spreads_to_dependent_results_and_to_no_others(kernel, token, width, dtype):
    lengths, parts = offsets_of([37, 20]), joined_projection(57, 2, width, dtype)
    query, key, value = (part.clone() for part in parts)
    query[token, 0, 3] = float("nan")  # one row of one head
    found = attend(kernel, query, parts[1].clone(), parts[2].clone(), lengths).isnan()
    assert found[token, 0].all()
    assert found.sum() == width
    key[token, 1, 3] = float("nan")  # all rows of one head of one sequence
    found = attend(kernel, parts[0].clone(), key, parts[2].clone(), lengths).isnan()
    assert found[:37, 1].all()
    assert found.sum() == 37 * width
    value[token, 1, 3] = float("nan")  # one column
    found = attend(kernel, parts[0].clone(), parts[1].clone(), value, lengths).isnan()
    assert found[:37, 1, 3].all()
    assert found.sum() == 37


def test_empty_batch_writes_nothing(kernel):
    query, key, value = joined_projection(3, 2, 32, torch.float32)
    assert (attend(kernel, query, key, value, np.zeros(1, dtype=np.int64)) == CANARY).all()
