"""Rotary positions by the kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_formulas import CANARY, assert_near, canaries, dtypes, threads


def rotated(x, cosine, sine, positions):
    """Return `x` in float64 with the pairs (i, i + half) of each head rotated, and the sums of |products|."""
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
def test_rotary_dimensions_rotate_by_position_and_others_do_not_change(
    kernel, positions, heads, half, rest, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    cosine, sine = torch.randn(2, 41, half, generator=generator)
    positions = torch.tensor(positions)
    whole, x = canaries(len(positions), heads, 2 * half + rest, dtype)
    x.copy_(torch.randn(x.shape, generator=generator))
    exact, sizes = rotated(x, cosine, sine, positions)
    before = x.clone()
    kernel.rotate(x, cosine, sine, positions)
    assert_near(x, exact, sizes)
    assert torch.equal(x[..., 2 * half :], before[..., 2 * half :])
    assert (whole[:, [0, -1]] == CANARY).all()


@pytest.mark.parametrize(("tokens", "count", "calls"), [(2000, 1, []), (2000, 2, [2]), (10, 2, [])])
def test_many_tokens_are_rotated_by_as_many_threads_as_torch_has(kernel, pool_calls, tokens, count, calls):
    x, cosine, sine = torch.randn(tokens, 4, 64), torch.randn(tokens, 32), torch.randn(tokens, 32)
    positions = torch.randperm(tokens)
    exact, sizes = rotated(x, cosine, sine, positions)
    with threads(count):
        kernel.rotate(x, cosine, sine, positions)
    assert pool_calls == calls
    assert_near(x, exact, sizes)
