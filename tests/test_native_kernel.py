"""The compiled kernel, at every level that was built and that this processor runs, against float64."""

import ctypes
import platform
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attncache_core import native

SCALE = 0.25
# What no sum gives, and what bfloat16 keeps as it is.
CANARY = -768.0
# A number is rounded to bfloat16 by at most this part of itself.
BFLOAT16 = 2**-8
# Sums of up to 200 products in float32 and an exponential, as part of the sum of the products' sizes: 1.1e-5
# was seen.
FLOAT32 = 2e-5

lengths_of_sequences = st.lists(st.integers(1, 200), min_size=1, max_size=6)
widths = st.sampled_from([8, 24, 32, 64, 96])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
map_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
reaches = st.one_of(st.none(), st.integers(0, 5), st.integers(6, 250))
# How far a token attends: before it and after it.
bands = st.one_of(st.just((None, None)), st.just((None, 0)), st.tuples(reaches, reaches))

NATIVE_FOLDER = Path(native.__file__).parent


def library(level):
    return NATIVE_FOLDER / f"attention_{level}{EXTENSION_SUFFIXES[0]}"


@pytest.fixture(scope="module", params=native._levels())
def kernel(request):
    if not library(request.param).is_file():
        pytest.skip("this level was not built")
    return native.AttentionKernel(request.param, library(request.param))


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def offsets_of(lengths, first=0):
    return first + np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def joined_projection(tokens, heads, width, dtype, seed=0):
    """Q, K and V [tokens, heads, width] side by side in one tensor, as a layer projects them."""
    generator = torch.Generator().manual_seed(seed)
    joined = torch.randn(tokens, 3 * heads + 1, width, generator=generator).mul(1.5).to(dtype)
    value, query, key, _ = joined.split([heads, heads, heads, 1], dim=1)
    return query, key, value


def two_projections(tokens, heads, width, dtype, seed=0):
    """Q, K and V again; V comes from a projection of its own, as a layer's reused heads have it."""
    query, key, _ = joined_projection(tokens, heads, width, dtype, seed)
    *_, value = joined_projection(tokens, heads + 1, width, dtype, seed + 1)
    return query, key, value[:, 1:]


def canaries(tokens, heads, width, dtype):
    """A tensor of canaries [tokens, heads + 2, width], and its heads in the middle."""
    whole = torch.full((tokens, heads + 2, width), CANARY, dtype=dtype)
    return whole, whole[:, 1:-1]


def band_of(length, before=None, after=None):
    """[L, L]: whether a token attends to another."""
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.triu(-length if before is None else -before).tril(length if after is None else after)


def own_maps(query, key, offsets, scale, before=None, after=None):
    """The maps [heads, L, L] of each sequence, in float64."""
    query, key = query.double(), key.double()
    for first, end in pairwise(offsets.tolist()):
        scores = torch.einsum("phd,qhd->hpq", query[first:end], key[first:end])
        beyond = ~band_of(end - first, before, after)
        yield torch.softmax((scale * scores).masked_fill(beyond, float("-inf")), dim=-1)


def products(maps, value, offsets):
    """maps @ V, and the sums of the products' sizes, [tokens, heads, width] from the first sequence on."""
    value = value.double()
    pairs = list(zip(maps, pairwise(offsets.tolist()), strict=True))
    exact, sizes = (
        torch.cat([torch.einsum("hpq,qhd->phd", own.double(), v[first:end]) for own, (first, end) in pairs])
        for v in (value, value.abs())
    )
    return exact, sizes


def assert_near(found, exact, sizes, rounded_maps=False):
    """No further off than the roundings that are named allow: of the result, and of each map's numbers."""
    allowed = (FLOAT32 + BFLOAT16 * rounded_maps) * sizes
    if found.dtype is torch.bfloat16:
        allowed = allowed + BFLOAT16 * (exact.abs() + allowed)
    beyond = (found.double() - exact).abs() - allowed
    # Not `beyond.max() <= 0`: a NaN must not pass.
    assert bool((beyond <= 0).all()), f"off by {beyond.max().item()} more than allowed"


def rounds_maps(kernel, dtype, *widths):
    """Whether computed maps are rounded to bfloat16 before they meet V."""
    whole = all(width % 32 == 0 for width in widths)
    return kernel.level == "avx512_bf16" and dtype is torch.bfloat16 and whole


def attend(kernel, query, key, value, offsets, scale=SCALE, **more):
    shape = (*query.shape[:2], value.shape[2])
    context = torch.full(shape, CANARY, dtype=value.dtype)
    kernel.attend(query, key, value, offsets, scale, context, **more)
    return context


@st.composite
def attentions(draw):
    """What `attend` is given: heads of any widths that take any heads of K and of V, and a band."""
    lengths, dtype = draw(lengths_of_sequences), draw(dtypes)
    key_width, width = draw(st.sampled_from([8, 24, 32, 64, 96, 192])), draw(widths)
    heads, key_heads, value_heads = (draw(st.integers(1, 4)) for _ in range(3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = [
        # One head more on each side: neither tokens nor heads lie as close as they could.
        torch.randn(sum(lengths), count + 2, size + 8, generator=generator).to(dtype)[:, 1:-1, :size]
        for count, size in ((heads, key_width), (key_heads, key_width), (value_heads, width))
    ]
    before, after = draw(bands)
    taken = {
        name: np.array(draw(st.lists(st.integers(0, count - 1), min_size=heads, max_size=heads)), np.int32)
        for name, count in (("key_heads", key_heads), ("value_heads", value_heads))
    }
    scale = 2 * key_width**-0.5
    return tensors, offsets_of(lengths), scale, {"before": before, "after": after, **taken}


def formula(query, key, value, offsets, scale, *, before, after, key_heads, value_heads):
    """The maps of each sequence; the context, and the sums of the products' sizes."""
    maps = list(own_maps(query, key[:, key_heads], offsets, scale, before, after))
    return maps, products(maps, value[:, value_heads], offsets)


@settings(max_examples=100)
@given(attention=attentions(), count=st.sampled_from([1, 2]))
def test_bands_widths_and_shared_heads_are_the_formulas(kernel, attention, count):
    (query, key, value), offsets, scale, more = attention
    kept = [torch.full((query.shape[1], n, n), CANARY, dtype=value.dtype) for n in np.diff(offsets)]
    with threads(count):
        found = attend(kernel, query, key, value, offsets, scale, kept=addresses(kept), **more)
        unkept = attend(kernel, query, key, value, offsets, scale, **more)
    assert torch.equal(found, unkept)
    maps, (exact, sizes) = formula(query, key, value, offsets, scale, **more)
    rounded = rounds_maps(kernel, value.dtype, query.shape[2], value.shape[2])
    assert_near(found, exact, sizes, rounded)
    for own, expected in zip(kept, maps, strict=True):
        allowed = FLOAT32 + BFLOAT16 * ((value.dtype is torch.bfloat16) + rounded) * expected
        assert bool(((own.double() - expected).abs() <= allowed).all())
        # Exactly nothing.
        assert (own[:, ~band_of(own.shape[1], more["before"], more["after"])] == 0).all()


@settings(max_examples=40)
@given(attention=attentions())
def test_band_that_reaches_beyond_the_length_is_none(kernel, attention):
    (query, key, value), offsets, scale, more = attention
    longest = int(np.diff(offsets).max())
    wide, unbound = (
        attend(kernel, query, key, value, offsets, scale, **more | {"before": reach, "after": reach})
        for reach in (longest - 1, None)
    )
    assert torch.equal(wide, unbound)
    for reach in (longest, 2**31 - 1, 2**40):
        more |= {"before": reach, "after": reach}
        assert torch.equal(attend(kernel, query, key, value, offsets, scale, **more), unbound)


@settings(max_examples=40)
@given(attention=attentions(), data=st.data())
def test_batch_of_bands_is_one_by_one_and_head_by_head_bit_for_bit(kernel, attention, data):
    (query, key, value), offsets, scale, more = attention
    together = attend(kernel, query, key, value, offsets, scale, **more)
    number = data.draw(st.integers(0, len(offsets) - 2))
    tokens = slice(*offsets[number : number + 2])
    band = {name: more[name] for name in ("before", "after")}
    for head, (k, v) in enumerate(zip(more["key_heads"], more["value_heads"], strict=True)):
        parts = query[tokens, [head]], key[tokens, [k]], value[tokens, [v]]
        alone = attend(kernel, *parts, offsets_of([tokens.stop - tokens.start]), scale, **band)
        assert torch.equal(alone[:, 0], together[tokens, head])


def turned(x, cosine, sine, positions):
    """`x` in float64, the pairs (i, i + half) of each head turned; the sums of the products' sizes."""
    half, x = sine.shape[1], x.double()
    c, s = (table[positions].double()[:, None] for table in (cosine, sine))
    a, b, rest = x.split([half, half, x.shape[2] - 2 * half], dim=2)
    sizes = [(a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs(), 0 * rest]
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=2), torch.cat(sizes, dim=2)


@settings(max_examples=60)
@given(
    positions=st.lists(st.integers(0, 40), min_size=1, max_size=50),
    heads=st.integers(1, 5),
    half=st.sampled_from([1, 4, 15, 16, 32, 40, 64]),
    rest=st.integers(0, 20),
    dtype=dtypes,
    seed=st.integers(0, 99),
)
def test_numbers_turn_by_their_positions_and_no_others(kernel, positions, heads, half, rest, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    cosine, sine = torch.randn(2, 41, half, generator=generator)
    positions = torch.tensor(positions)
    whole, x = canaries(len(positions), heads, 2 * half + rest, dtype)
    x.copy_(torch.randn(x.shape, generator=generator))
    exact, sizes = turned(x, cosine, sine, positions)
    before = x.clone()
    kernel.rotate(x, cosine, sine, positions)
    assert_near(x, exact, sizes)
    assert torch.equal(x[..., 2 * half :], before[..., 2 * half :])
    assert (whole[:, [0, -1]] == CANARY).all()


@pytest.mark.parametrize(("tokens", "count", "calls"), [(2000, 1, []), (2000, 2, [2]), (10, 2, [])])
def test_many_tokens_are_turned_by_as_many_threads_as_torch_has(kernel, pool_calls, tokens, count, calls):
    x, cosine, sine = torch.randn(tokens, 4, 64), torch.randn(tokens, 32), torch.randn(tokens, 32)
    positions = torch.randperm(tokens)
    exact, sizes = turned(x, cosine, sine, positions)
    with threads(count):
        kernel.rotate(x, cosine, sine, positions)
    assert pool_calls == calls
    assert_near(x, exact, sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(None, 0), (20, 0), (0, 30), (0, 0), (33, 16)])
@pytest.mark.parametrize("place", [0, 40, 119])
def test_tokens_beyond_the_band_are_left_out(kernel, place, before, after, dtype):
    offsets, own = offsets_of([120]), joined_projection(120, 1, 32, dtype)
    band = {"before": before, "after": after}
    query, key, value = (part.clone() for part in own)
    attended = band_of(120, before, after)[:, place]
    key[place] = query[0] * 2.0**20  # no score beyond the band is a row's largest
    expected = attend(kernel, *own, offsets, **band)
    assert torch.equal(attend(kernel, query, key, own[2], offsets, **band)[~attended], expected[~attended])
    key[place] = float("nan")
    found = attend(kernel, query, key, own[2], offsets, **band).isnan().all(dim=-1).flatten()
    assert torch.equal(found, attended)
    value[place] = float("nan")
    found = attend(kernel, query, own[1], value, offsets, **band).isnan().all(dim=-1).flatten()
    assert found[attended].all()
    # Rows that meet V together share their tokens, rounded to vectors.
    near = band_of(120, None if before is None else before + 24, after + 8)[:, place]
    assert not found[~near].any()


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "missing"),
        ({"key_heads": np.zeros(4, np.int32)}, "missing"),
        ({"key_heads": np.zeros(4, np.int64)}, "int64"),
        ({"key_heads": np.zeros(3, np.int32)}, "3"),
    ],
)
def test_heads_that_are_not_there_are_refused(kernel, more, name):
    query, key, value = torch.zeros(5, 4, 32), torch.zeros(5, 2, 32), torch.zeros(5, 2, 32)
    with pytest.raises(ValueError, match=name):
        attend(kernel, query, key, value, offsets_of([5]), **more)


@settings(max_examples=60)
@given(
    lengths=lengths_of_sequences,
    heads=st.integers(1, 6),
    width=widths,
    dtype=dtypes,
    count=st.sampled_from([1, 2]),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    projected=st.sampled_from([joined_projection, two_projections]),
)
@example([200, 1, 16, 17, 31, 32], 6, 32, torch.bfloat16, 2, 1, 1, joined_projection)
@example([8, 15, 16, 7, 9, 1], 2, 96, torch.float32, 1, 0, 2, two_projections)
def test_context_is_the_formulas_and_nothing_else_is_written(
    kernel, lengths, heads, width, dtype, count, before, after, projected
):
    tokens = before + sum(lengths) + after
    query, key, value = projected(tokens, heads, width, dtype, seed=sum(lengths))
    offsets = offsets_of(lengths, first=before)
    whole, context = canaries(tokens, heads, width, dtype)
    with threads(count):
        kernel.attend(query, key, value, offsets, SCALE, context)
    exact, sizes = products(own_maps(query, key, offsets, SCALE), value, offsets)
    assert_near(context[before : tokens - after], exact, sizes, rounds_maps(kernel, dtype, width))
    assert (whole[:, [0, -1]] == CANARY).all()
    assert (whole[:before] == CANARY).all()
    assert (whole[tokens - after :] == CANARY).all()


@settings(max_examples=60)
@given(
    lengths=lengths_of_sequences,
    heads=st.integers(1, 6),
    width=widths,
    dtype=dtypes,
    count=st.sampled_from([1, 2]),
    between=st.integers(0, 3),
)
@example([200, 1, 16, 17, 31, 32], 6, 32, torch.bfloat16, 2, 1)
@example([8, 15, 16, 7, 9, 1], 2, 96, torch.float32, 1, 2)
def test_kept_maps_are_the_formulas_and_nothing_else_is_written(
    kernel, lengths, heads, width, dtype, count, between
):
    query, key, value = joined_projection(sum(lengths), heads, width, dtype, seed=sum(lengths))
    offsets = offsets_of(lengths)
    # The maps of a sequence anywhere, with canaries before, between and behind.
    sizes = [heads * length**2 for length in lengths]
    starts = offsets_of([size + between for size in sizes], first=between)[:-1]
    buffer = torch.full((sum(sizes) + between * (len(sizes) + 1),), CANARY, dtype=dtype)
    kept = [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    context = torch.empty_like(value)
    with threads(count):
        kernel.attend(query, key, value, offsets, SCALE, context, kept=addresses(kept))
        unkept = attend(kernel, query, key, value, offsets)
    assert torch.equal(context, unkept)  # to keep maps changes nothing
    # Where the weights of a row are rounded before they are shares, its numbers are rounded twice.
    roundings = BFLOAT16 * ((dtype is torch.bfloat16) + rounds_maps(kernel, dtype, width))
    for found, exact in zip(kept, own_maps(query, key, offsets, SCALE), strict=True):
        allowed = FLOAT32 + roundings * exact.flatten()
        assert bool(((found.double() - exact.flatten()).abs() <= allowed).all())
        found.fill_(CANARY)
    assert (buffer == CANARY).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("size", [2.0**-60, 2.0**-6, 1.0, 2.0**20, 2.0**50])
def test_scores_of_any_size_neither_overflow_nor_lose_the_softmax(kernel, size, width, dtype):
    # Small whole numbers times a power of two: every score is exact, and the softmax is all that can fail.
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
@pytest.mark.parametrize("place", [0, 15, 16, 36])
def test_one_huge_score_takes_the_whole_row(kernel, place, width, dtype):
    query, key, value = joined_projection(37, 2, width, dtype)
    query, key = query.clone(), key.clone()
    query[20], key[place] = 2.0**40, 2.0**60
    found = attend(kernel, query, key, value, offsets_of([37]))
    assert torch.equal(found[20], value[place])
    assert found.isfinite().all()


def test_most_negative_row_is_still_a_softmax(kernel):
    # Every score lies far below zero: what fills up a vector must not count as the largest.
    query = torch.full((5, 1, 32), 2.0**30)
    key = torch.full((5, 1, 32), -(2.0**30))
    value = torch.arange(5 * 32.0).view(5, 1, 32)
    found = attend(kernel, query, key, value, offsets_of([5]))
    torch.testing.assert_close(found, value.mean(dim=0, keepdim=True).expand(5, 1, 32), atol=1e-4, rtol=0)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=2, max_size=5),
    heads=st.integers(1, 3),
    width=widths,
    dtype=dtypes,
    count=st.sampled_from([1, 2]),
)
@example([200, 130, 200, 77], 4, 32, torch.bfloat16, 2)
@example([200, 130, 200, 77], 4, 24, torch.float32, 2)
def test_batch_is_one_by_one_bit_for_bit(kernel, lengths, heads, width, dtype, count):
    query, key, value = joined_projection(sum(lengths), heads, width, dtype)
    offsets = offsets_of(lengths)
    with threads(count):
        together = attend(kernel, query, key, value, offsets)
    with threads(1):
        alone = [
            attend(kernel, query[first:end], key[first:end], value[first:end], offsets_of([end - first]))
            for first, end in pairwise(offsets.tolist())
        ]
    assert torch.equal(together, torch.cat(alone))


def made_maps(lengths, heads, dtype, seed=0):
    """For each length maps [heads, L, L] as a record keeps them: some numbers are tiny, none is exact."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(heads, length, length, generator=generator).mul(3).softmax(-1).to(dtype)
        for length in lengths
    ]


def addresses(maps):
    return np.array([own.data_ptr() for own in maps], dtype=np.uint64)


def run_starts(copies):
    """The first sequence of each run, and the number of sequences at the end."""
    return offsets_of(copies)


def apply_maps(kernel, maps, runs, value, offsets, heads=None, **more):
    context = torch.full((len(value), heads or value.shape[1], value.shape[2]), CANARY, dtype=value.dtype)
    kernel.apply_maps(addresses(maps), maps[0].dtype, runs, value, offsets, context, **more)
    return context


def packed(maps):
    """The lower triangles of maps [heads, L, L], row by row."""
    return maps[:, torch.ones(maps.shape[1:], dtype=torch.bool).tril()]


@settings(max_examples=100)
@given(
    runs=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 3)), min_size=1, max_size=4),
    taken=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    width=widths,
    dtype=dtypes,
    map_dtype=map_dtypes,
    before=reaches,
    count=st.sampled_from([1, 2]),
)
@example([(199, 3), (1, 2), (17, 1), (32, 3)], [1, 1, 0], 32, torch.bfloat16, torch.bfloat16, None, 2)
def test_packed_maps_are_square_ones_bit_for_bit(kernel, runs, taken, width, dtype, map_dtype, before, count):
    run_lengths, copies = map(list, zip(*runs, strict=True))
    lengths = np.repeat(run_lengths, copies).tolist()
    _, _, value = joined_projection(sum(lengths), 3, width, dtype, seed=sum(lengths))
    made = [
        maps.masked_fill(~band_of(maps.shape[1], before, 0), 0)
        for maps in made_maps(run_lengths, len(taken), map_dtype)
    ]
    maps = [own for own, number in zip(made, copies, strict=True) for _ in range(number)]
    triangles = [packed(own) for own in made]
    shared = [own for own, number in zip(triangles, copies, strict=True) for _ in range(number)]
    offsets, heads = offsets_of(lengths), np.array(taken, np.int32)
    with threads(count):
        square, stopped, from_triangles, from_bands = (
            apply_maps(
                kernel, held, run_starts(copies), value, offsets, len(taken), value_heads=heads, **more
            )
            for held, more in (
                (maps, {}),
                (maps, {"before": before, "after": 0}),
                (shared, {"packed": True}),
                (shared, {"packed": True, "before": before}),
            )
        )
    assert_near(square, *products(maps, value[:, taken], offsets))
    assert torch.equal(stopped, square)
    assert torch.equal(from_triangles, square)
    assert torch.equal(from_bands, square)


@settings(max_examples=40)
@given(length=st.integers(1, 200), band=bands, width=widths, dtype=dtypes, map_dtype=map_dtypes)
def test_maps_that_are_zero_beyond_a_band_are_whole_maps_bit_for_bit(
    kernel, length, band, width, dtype, map_dtype
):
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
def test_given_maps_meet_their_values_and_nothing_else_is_written(
    kernel, runs, heads, width, dtype, map_dtype, count, before, after
):
    run_lengths, copies = map(list, zip(*runs, strict=True))
    lengths = np.repeat(run_lengths, copies).tolist()
    tokens = before + sum(lengths) + after
    *_, value = joined_projection(tokens, heads, width, dtype, seed=sum(lengths))
    offsets = offsets_of(lengths, first=before)
    made = made_maps(run_lengths, heads, map_dtype)
    maps = [own for own, number in zip(made, copies, strict=True) for _ in range(number)]
    whole, context = canaries(tokens, heads, width, dtype)
    with threads(count):
        kernel.apply_maps(addresses(maps), map_dtype, run_starts(copies), value, offsets, context)
    # No rounding but the result's: records are multiplied as they are.
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
def test_runs_that_share_a_record_are_each_sequence_by_itself_bit_for_bit(
    kernel, length, copies, width, dtype, map_dtype
):
    heads = 2
    lengths = [length] * sum(copies)
    *_, value = joined_projection(sum(lengths), heads, width, dtype)
    made = made_maps([length] * len(copies), heads, map_dtype)
    maps = [own for own, number in zip(made, copies, strict=True) for _ in range(number)]
    offsets = offsets_of(lengths)
    shared = apply_maps(kernel, maps, run_starts(copies), value, offsets)
    separate = apply_maps(kernel, maps, np.arange(len(lengths) + 1), value, offsets)
    alone = [
        apply_maps(kernel, [own], np.arange(2), value[first:end], offsets_of([length]))
        for own, (first, end) in zip(maps, pairwise(offsets.tolist()), strict=True)
    ]
    assert torch.equal(shared, separate)
    assert torch.equal(shared, torch.cat(alone))


def test_maps_of_a_run_are_those_of_its_first_sequence(kernel):
    # So the maps are read once: addresses of the others in a run are not looked at.
    *_, value = joined_projection(27, 1, 32, torch.float32)
    maps = made_maps([9], 1, torch.bfloat16)
    places = np.array([maps[0].data_ptr(), 0, 0], dtype=np.uint64)
    context = torch.zeros_like(value)
    kernel.apply_maps(places, torch.bfloat16, np.array([0, 3]), value, offsets_of([9] * 3), context)
    assert_near(context, *products(maps * 3, value, offsets_of([9] * 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 64])
@pytest.mark.parametrize("place", [0, 15, 16, 36])
def test_what_is_no_number_is_seen_in_all_that_is_made_of_it_and_nowhere_else(kernel, place, width, dtype):
    lengths, own = offsets_of([37, 20]), joined_projection(57, 2, width, dtype)
    query, key, value = (part.clone() for part in own)
    query[place, 0, 3] = float("nan")  # one row of one head
    found = attend(kernel, query, own[1].clone(), own[2].clone(), lengths).isnan()
    assert found[place, 0].all()
    assert found.sum() == width
    key[place, 1, 3] = float("nan")  # all rows of one head of one sequence
    found = attend(kernel, own[0].clone(), key, own[2].clone(), lengths).isnan()
    assert found[:37, 1].all()
    assert found.sum() == 37 * width
    value[place, 1, 3] = float("nan")  # one column
    found = attend(kernel, own[0].clone(), own[1].clone(), value, lengths).isnan()
    assert found[:37, 1, 3].all()
    assert found.sum() == 37


def test_no_sequences_write_nothing(kernel):
    query, key, value = joined_projection(3, 2, 32, torch.float32)
    assert (attend(kernel, query, key, value, np.zeros(1, dtype=np.int64)) == CANARY).all()


def test_calls_of_two_python_threads_at_once_do_not_meet(kernel):
    jobs = []
    for seed, lengths in enumerate(([180, 3, 99, 64], [33, 200, 5, 120, 1])):
        parts = joined_projection(sum(lengths), 4, 32, torch.bfloat16, seed=seed)
        maps = made_maps(lengths, 4, torch.bfloat16, seed)
        jobs.append((parts, offsets_of(lengths), maps))

    def results(parts, offsets, maps):
        own = np.arange(len(offsets))
        return attend(kernel, *parts, offsets), apply_maps(kernel, maps, own, parts[2], offsets)

    expected = [results(*job) for job in jobs]
    start = Barrier(2)

    def repeatedly(job):
        start.wait()
        return [results(*job) for _ in range(40)]

    with threads(2), ThreadPoolExecutor(2) as pool:
        for found, (attended, applied) in zip(pool.map(repeatedly, jobs), expected, strict=True):
            assert all(torch.equal(pair[0], attended) and torch.equal(pair[1], applied) for pair in found)


PARALLEL = ctypes.CFUNCTYPE(
    None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
)


@pytest.fixture
def pool_calls(kernel):
    """The numbers of threads that the kernel asked the pool for; the pool runs them one after another."""
    calls = []

    @PARALLEL
    def pool(work, job, count, _):
        calls.append(count)
        for _ in range(count):
            work(job)

    loaded = ctypes.CDLL(str(library(kernel.level)))
    loaded.set_parallel(pool)
    yield calls
    # A kernel that is made gets torch's pool again.
    native.AttentionKernel(kernel.level, library(kernel.level))


@pytest.mark.parametrize(
    ("length", "count", "calls"), [(200, 1, []), (200, 2, [2]), (200, 3, [3]), (10, 2, [])]
)
def test_large_work_is_shared_by_as_many_threads_as_torch_has(kernel, pool_calls, length, count, calls):
    query, key, value = joined_projection(3 * length, 2, 64, torch.float32)
    offsets = offsets_of([length] * 3)
    maps = made_maps([length] * 3, 2, torch.float16)
    with threads(count):
        found = attend(kernel, query, key, value, offsets)
        assert pool_calls == calls
        applied = apply_maps(kernel, maps, np.arange(4), value, offsets)
        assert pool_calls == calls * 2
    assert_near(found, *products(own_maps(query, key, offsets, SCALE), value, offsets))
    assert_near(applied, *products(maps, value, offsets))


EDGE_SCRIPT = Path(__file__).with_name("kernel_at_the_edge.py")


def at_the_edge(kernel, what):
    """The exit status of a process in which memory that may not be read lies around all tensors."""
    command = [sys.executable, str(EDGE_SCRIPT), kernel.level, str(library(kernel.level)), what]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return run.returncode, run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected by mprotect")
@pytest.mark.parametrize("what", ["records", "packed", "computed"])
def test_nothing_is_read_or_written_beyond_a_record_or_a_tensor(kernel, what):
    assert at_the_edge(kernel, what) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected by mprotect")
@pytest.mark.parametrize("what", ["one row too many", "one row too few"])
def test_a_row_beyond_would_end_the_process(kernel, what):
    status, _ = at_the_edge(kernel, what)
    assert status == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("capability", "bfloat16", "levels"),
    [
        ("AVX512", True, ["avx512_bf16", "avx512", "avx2"]),
        ("AVX512", False, ["avx512", "avx2"]),
        ("AVX2", True, ["avx2"]),
        ("AVX2", False, ["avx2"]),
        ("DEFAULT", False, ["neon"]),
    ],
)
def test_levels_are_those_of_the_processor_the_best_first(monkeypatch, capability, bfloat16, levels):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    assert native._levels() == levels


# What `kernel` does at its first call, whatever was called before.
chosen_kernel = native.kernel.__wrapped__


def test_chosen_kernel_is_the_best_that_was_built():
    built = [level for level in native._levels() if library(level).is_file()]
    chosen = chosen_kernel()
    assert (chosen.level if chosen else None) == (built[0] if built else None)


@pytest.mark.skipif(
    sys.platform != "linux" or (platform.machine() == "x86_64" and native._levels() == ["neon"]),
    reason="kernels are built for Linux, and for x86 from AVX2 on",
)
def test_a_kernel_was_built_for_this_processor():
    assert chosen_kernel() is not None


@pytest.mark.parametrize("content", [b"", b"no library", bytes(5000)], ids=["empty", "text", "zeros"])
def test_library_that_cannot_be_loaded_is_passed_over(kernel, monkeypatch, tmp_path, content):
    damaged, whole = (tmp_path / library(level).name for level in ("damaged", kernel.level))
    damaged.write_bytes(content)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(native, "_levels", lambda: ["damaged", kernel.level])
    assert chosen_kernel() is None
    shutil.copy(library(kernel.level), whole)
    assert chosen_kernel().level == kernel.level


def test_level_that_was_not_built_is_passed_over(monkeypatch):
    built = [level for level in native._levels() if library(level).is_file()]
    monkeypatch.setattr(native, "_levels", lambda: ["never_built", *built[-1:]])
    chosen = chosen_kernel()
    assert [chosen.level if chosen else None] == (built[-1:] or [None])


def test_where_nothing_was_built_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(native, "_levels", lambda: ["never_built"])
    assert chosen_kernel() is None


@pytest.mark.parametrize(("compiled", "level"), [(SimpleNamespace(level="avx2"), "avx2"), (None, None)])
def test_level_is_the_chosen_kernels(monkeypatch, compiled, level):
    monkeypatch.setattr(native, "kernel", lambda: compiled)
    assert native.level() == level


@pytest.mark.parametrize(
    ("dtype", "device", "takes"),
    [
        (torch.float32, "cpu", True),
        (torch.bfloat16, "cpu", True),
        (torch.float16, "cpu", False),
        (torch.float64, "cpu", False),
        (torch.float32, "meta", False),
    ],
)
def test_kernel_takes_what_it_computes_on(kernel, dtype, device, takes):
    assert kernel.takes(torch.empty(1, 1, 8, dtype=dtype, device=device)) is takes
