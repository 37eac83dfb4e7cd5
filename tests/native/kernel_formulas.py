"""What the compiled kernel is measured against, in float64, and what its tests are made of."""

from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
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


def apply_maps(kernel, maps, runs, value, offsets, **more):
    context = torch.full(value.shape, CANARY, dtype=value.dtype)
    kernel.apply_maps(addresses(maps), maps[0].dtype, runs, value, offsets, context, **more)
    return context
