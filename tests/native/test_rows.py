"""The compiled passes over rows, at every level of the kernel: weights of few bits, and norms."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_formulas import threads

from attncache_core.native import products
from attncache_core.native.pooling import CompiledNorm, NativeNorm

# The error of norms in float32, relative to the magnitude of the input; the largest error seen is 4e-6.
FLOAT32 = 2e-5

shapes = st.tuples(st.integers(1, 40), st.integers(1, 100))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
sizes = st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e20])


def numbers(shape, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape).to(dtype)


@settings(max_examples=100)
@given(shapes, dtypes, sizes, st.integers(0, 1000))
def test_8_bits_are_unpacked_as_torch_multiplies(kernel, shape, dtype, size, seed):
    torch.manual_seed(seed)
    levels = torch.randint(-128, 128, shape, dtype=torch.int8)
    scales = torch.rand(shape[0]) * size
    found = products.unpack_8_bits(kernel.library, levels, scales, dtype)
    assert torch.equal(found, (levels * scales[:, None]).to(dtype))


def unpacked_4_bits(levels, steps, width):
    """Return the unpacked rows, float32 [rows, width]."""
    numbers = torch.stack([levels & 15, levels >> 4], dim=2).flatten(2)  # [rows, groups, 32]
    return (numbers * steps[..., :1].float() + steps[..., 1:].float()).flatten(1)[:, :width]


@settings(max_examples=100)
@given(shapes, dtypes, sizes, st.integers(0, 1000))
def test_4_bits_are_unpacked_as_torch_multiplies_and_adds(kernel, shape, dtype, size, seed):
    torch.manual_seed(seed)
    groups = -(-shape[1] // 32)
    levels = torch.randint(256, (shape[0], groups, 16), dtype=torch.uint8)
    steps = (torch.randn(shape[0], groups, 2) * size).bfloat16()
    found = products.unpack_4_bits(kernel.library, levels, steps, shape[1], dtype)
    # A level times a step is exact in float32, so a fused multiply-add makes no difference.
    assert torch.equal(found, unpacked_4_bits(levels, steps, shape[1]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_number_of_threads_changes_nothing(kernel, dtype):
    scales, steps = numbers(1500), numbers((1500, 4, 2), torch.bfloat16)
    signed = torch.randint(-128, 128, (1500, 99), dtype=torch.int8)
    nibbles = torch.randint(256, (1500, 4, 16), dtype=torch.uint8)
    found = []
    for count in (1, 2, 5):
        with threads(count):
            eight = products.unpack_8_bits(kernel.library, signed, scales, dtype)
            found.append((eight, products.unpack_4_bits(kernel.library, nibbles, steps, 99, dtype)))
    for other in found[1:]:
        assert all(torch.equal(left, right) for left, right in zip(found[0], other, strict=True))


@settings(max_examples=30)
@given(shapes, dtypes)
def test_nothing_beyond_the_results_is_written(kernel, shape, dtype):
    made = []

    def beside_canaries(size, dtype=torch.float32):
        size = [size] if isinstance(size, int) else size
        made.append(torch.full((math.prod(size) + 64,), 77).to(dtype))
        return made[-1][32:-32].view(size)

    groups = -(-shape[1] // 32)
    nibbles, steps = torch.zeros(shape[0], groups, 16).byte(), numbers((shape[0], groups, 2), torch.bfloat16)
    with mock.patch.object(products.torch, "empty", beside_canaries):
        products.unpack_8_bits(kernel.library, torch.ones(shape).char(), torch.ones(shape[0]), dtype)
        products.unpack_4_bits(kernel.library, nibbles, steps, shape[1], dtype)
    assert len(made) == 2
    for whole in made:
        assert (whole[:32] == 77).all()
        assert (whole[-32:] == 77).all()


@settings(max_examples=50)
@given(shapes, st.booleans(), st.integers(0, 1000))
@example((9, 48), True, 0)  # rows of whole vectors, of which neighbours are computed side by side
@example((9, 48), False, 0)
def test_norms_of_rows_are_those_of_torch_and_each_row_is_that_of_the_row_alone(kernel, shape, mean, seed):
    x, weight, bias = (
        numbers(sizes, seed=seed + at) for at, sizes in enumerate((shape, shape[1:], shape[1:]))
    )
    norm = NativeNorm(kernel.library, CompiledNorm(weight, bias if mean else None, 1e-5, subtracts_mean=mean))
    found, double = norm(x), x.double()
    if mean:
        expected = torch.layer_norm(double, shape[1:], weight.double(), bias.double(), 1e-5)
    else:
        expected = double * (double.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(found.double(), expected, rtol=FLOAT32, atol=FLOAT32 * 10)
    assert torch.equal(found, torch.cat([norm(row) for row in x.split(1)]))


@pytest.mark.parametrize("mean", [True, False])
def test_row_whose_squares_overflow_is_nan_and_no_other_row_is(kernel, mean):
    """As finite numbers, all such rows would be equal, and every text would have one embedding."""
    x, weight, bias = numbers((9, 48), seed=0), numbers((48,), seed=1), numbers((48,), seed=2)
    norm = NativeNorm(kernel.library, CompiledNorm(weight, bias, 1e-5, subtracts_mean=mean))
    for scale in (1e20, 1e30, 1e37):
        large = x.clone()
        large[4] *= scale
        found = norm(large)
        assert found[4].isnan().all()
        kept = torch.arange(9) != 4
        assert torch.equal(found[kept], norm(x)[kept])
