"""Reference formulas for the compiled kernel, in float64, and helpers for its tests."""

import subprocess
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

from attncache_core.native import attention_kernel

SCALE = 0.25
# A value that no sum has, and that bfloat16 represents exactly.
CANARY = -768.0
# The largest relative error of rounding to bfloat16.
BFLOAT16 = 2**-8
# The error of sums of up to 200 products in float32 and an exponential, relative to the sum of the products'
# absolute values; the largest error seen is 1.1e-5.
FLOAT32 = 2e-5

lengths_of_sequences = st.lists(st.integers(1, 200), min_size=1, max_size=6)
widths = st.sampled_from([8, 24, 32, 64, 96])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
map_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
reaches = st.one_of(st.none(), st.integers(0, 5), st.integers(6, 250))
# The numbers of tokens before and after itself that a token attends to.
bands = st.one_of(st.just((None, None)), st.just((None, 0)), st.tuples(reaches, reaches))


def run_script(script: Path, *arguments: str) -> tuple[int, str]:
    """Run a Python script and return its exit status and standard error, without what an emulator adds."""
    # Since 3.12, Python warns of each fork of a process with threads.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", str(script), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    told = ended.stderr.splitlines(keepends=True)
    return ended.returncode, "".join(line for line in told if not line.startswith("qemu: uncaught target"))


NATIVE_FOLDER = Path(attention_kernel.__file__).parent


def library(level):
    return NATIVE_FOLDER / f"attention_{level}.so"


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
    """Make Q, K and V [tokens, heads, width] as adjacent views of one tensor, as a layer projects them."""
    generator = torch.Generator().manual_seed(seed)
    joined = torch.randn(tokens, 3 * heads + 1, width, generator=generator).mul(1.5).to(dtype)
    value, query, key, _ = joined.split([heads, heads, heads, 1], dim=1)
    return query, key, value


def two_projections(tokens, heads, width, dtype, seed=0):
    """Make Q, K and V with V from another projection, as for the reused heads of a layer."""
    query, key, _ = joined_projection(tokens, heads, width, dtype, seed)
    *_, value = joined_projection(tokens, heads + 1, width, dtype, seed + 1)
    return query, key, value[:, 1:]


def canaries(tokens, heads, width, dtype):
    """Make a tensor of canaries [tokens, heads + 2, width], and a view without its first and last head."""
    whole = torch.full((tokens, heads + 2, width), CANARY, dtype=dtype)
    return whole, whole[:, 1:-1]


def band_of(length, before=None, after=None):
    """Return whether each token attends to each other token, bool [L, L]."""
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.triu(-length if before is None else -before).tril(length if after is None else after)


def own_maps(query, key, offsets, scale, before=None, after=None):
    """Yield the maps [heads, L, L] of each sequence, in float64."""
    query, key = query.double(), key.double()
    for first, end in pairwise(offsets.tolist()):
        scores = torch.einsum("phd,qhd->hpq", query[first:end], key[first:end])
        beyond = ~band_of(end - first, before, after)
        yield torch.softmax((scale * scores).masked_fill(beyond, float("-inf")), dim=-1)


def products(maps, value, offsets):
    """Return maps @ V and maps @ |V|, each [tokens, heads, width], for the tokens of all sequences."""
    value = value.double()
    pairs = list(zip(maps, pairwise(offsets.tolist()), strict=True))
    exact, sizes = (
        torch.cat(
            [torch.einsum("hpq,qhd->phd", weights.double(), v[first:end]) for weights, (first, end) in pairs]
        )
        for v in (value, value.abs())
    )
    return exact, sizes


def assert_near(found, exact, sizes, rounded_maps=False):
    """Assert that the error is within the rounding of sums, results and, with `rounded_maps`, maps."""
    allowed = (FLOAT32 + BFLOAT16 * rounded_maps) * sizes
    if found.dtype is torch.bfloat16:
        allowed = allowed + BFLOAT16 * (exact.abs() + allowed)
    beyond = (found.double() - exact).abs() - allowed
    # Not `beyond.max() <= 0`: a NaN must not pass.
    assert bool((beyond <= 0).all()), f"off by {beyond.max().item()} more than allowed"


def rounds_maps(kernel, dtype, *widths):
    """Return whether the kernel rounds computed maps to bfloat16 before the product with V."""
    whole = all(width % 32 == 0 for width in widths)
    return kernel.level in ("avx512_bf16", "avx512_amx") and dtype is torch.bfloat16 and whole


def attend(kernel, query, key, value, offsets, scale=SCALE, **more):
    shape = (*query.shape[:2], value.shape[2])
    context = torch.full(shape, CANARY, dtype=value.dtype)
    kernel.attend(query, key, value, offsets, scale, context, **more)
    return context


def made_maps(lengths, heads, dtype, seed=0):
    """Make maps [heads, L, L] for each length, as in records: some elements are tiny, and none is exact."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(heads, length, length, generator=generator).mul(3).softmax(-1).to(dtype)
        for length in lengths
    ]


def addresses(maps):
    return np.array([each.data_ptr() for each in maps], dtype=np.uint64)


def run_starts(copies):
    """Return the first sequence of each run, followed by the number of sequences."""
    return offsets_of(copies)


def apply_maps(kernel, maps, runs, value, offsets, **more):
    context = torch.full(value.shape, CANARY, dtype=value.dtype)
    kernel.apply_maps(addresses(maps), maps[0].dtype, runs, value, offsets, context, **more)
    return context
