"""The compiled passes before and after products with quantised weights, at every level of the kernel."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_formulas import threads

from attncache_core import native
from attncache_core.models.prepacked import ACTIVATIONS
from attncache_core.native import rows
from attncache_core.native.pooling import CompiledNorm, NativeNorm

# The error of float32 and of the approximations of e^x and of the error function, relative to the magnitude
# of the input; the largest error seen is 4e-6.
FLOAT32 = 2e-5
# The largest relative error of rounding to bfloat16.
BFLOAT16 = 2**-8

shapes = st.tuples(st.integers(1, 40), st.integers(1, 100))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
sizes = st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e20])


@pytest.fixture(scope="module")
def row_kernel(kernel):
    return rows.RowKernel(kernel.library)


def numbers(shape, dtype=torch.float32, seed=0, size=1.0):
    torch.manual_seed(seed)
    return (torch.randn(shape) * size).to(dtype)


@settings(max_examples=100)
@given(shapes, dtypes, sizes, st.integers(0, 1000))
def test_levels_times_scale_are_the_row_within_half_a_step(row_kernel, shape, dtype, size, seed):
    x = numbers(shape, dtype, seed, size)
    levels, scales = row_kernel.quantize(x)
    assert (levels.dtype, scales.dtype) == (torch.uint8, torch.float32)
    steps = levels.double() - 128
    assert (steps.abs().amax(dim=1) == 127).all()
    largest = x.double().abs().amax(dim=1)
    torch.testing.assert_close(scales.double(), largest / 127, rtol=1e-6, atol=0)
    off = (steps * scales[:, None].double() - x.double()).abs()
    assert (off <= (0.5 + 1e-4) * scales[:, None]).all()


@settings(max_examples=100)
@given(
    shapes,
    dtypes,
    st.sampled_from([None, *ACTIVATIONS]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.01, 1.0, 30.0, 1e4]),
    st.integers(0, 1000),
)
def test_product_is_scaled_shifted_activated_and_added_to(
    row_kernel, shape, dtype, activation, has_bias, has_residual, size, seed
):
    product = numbers(shape, seed=seed, size=size)
    scales = torch.rand(shape[0]) + 0.1
    bias = numbers(shape[1], seed=seed + 1) if has_bias else None
    residual = numbers(shape, dtype, seed + 2) if has_residual else None
    expected = product.double() * scales[:, None].double()
    if has_bias:
        expected = expected + bias.double()
    if activation:
        expected = ACTIVATIONS[activation](expected)
    if has_residual:
        expected = expected + residual.double()
    tolerance = FLOAT32 if dtype == torch.float32 else BFLOAT16
    found = row_kernel.finish(product.clone(), scales, bias, activation, residual, dtype)
    assert found.dtype == dtype
    off = (found.double() - expected).abs()
    size_of_terms = product.abs() * scales[:, None] + (bias.abs() if has_bias else 0)
    assert (off <= FLOAT32 * size_of_terms + tolerance * expected.abs() + 1e-6).all()


@settings(max_examples=100)
@given(shapes, dtypes, sizes, st.integers(0, 1000))
def test_8_bits_are_unpacked_as_torch_multiplies(row_kernel, shape, dtype, size, seed):
    torch.manual_seed(seed)
    levels = torch.randint(-128, 128, shape, dtype=torch.int8)
    scales = torch.rand(shape[0]) * size
    found = row_kernel.unpack_8_bits(levels, scales, dtype)
    assert torch.equal(found, (levels * scales[:, None]).to(dtype))


def unpacked_4_bits(levels, steps, width):
    """Return the unpacked rows, float32 [rows, width]."""
    numbers = torch.stack([levels & 15, levels >> 4], dim=2).flatten(2)  # [rows, groups, 32]
    return (numbers * steps[..., :1].float() + steps[..., 1:].float()).flatten(1)[:, :width]


@settings(max_examples=100)
@given(shapes, dtypes, sizes, st.integers(0, 1000))
def test_4_bits_are_unpacked_as_torch_multiplies_and_adds(row_kernel, shape, dtype, size, seed):
    torch.manual_seed(seed)
    groups = -(-shape[1] // 32)
    levels = torch.randint(256, (shape[0], groups, 16), dtype=torch.uint8)
    steps = (torch.randn(shape[0], groups, 2) * size).bfloat16()
    found = row_kernel.unpack_4_bits(levels, steps, shape[1], dtype)
    # A level times a step is exact in float32, so a fused multiply-add makes no difference.
    assert torch.equal(found, unpacked_4_bits(levels, steps, shape[1]).to(dtype))


@settings(max_examples=100)
@given(shapes, dtypes, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_row_that_is_not_finite_has_the_scale_nan(row_kernel, shape, dtype, number, data):
    x = numbers(shape, dtype)
    row, column = (data.draw(st.integers(0, size - 1)) for size in shape)
    x[row, column] = number
    _, scales = row_kernel.quantize(x)
    assert scales.isnan().nonzero().flatten().tolist() == [row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_nan_stays_nan_when_a_product_is_finished(row_kernel, activation, dtype):
    product, scales = numbers((3, 40)), torch.ones(3)
    scales[1] = torch.nan
    found = row_kernel.finish(product, scales, None, activation, None, dtype).isnan()
    assert found[1].all()
    assert found.sum() == 40


def test_rows_of_zeros_stay_zeros(row_kernel):
    levels, scales = row_kernel.quantize(torch.zeros(3, 20))
    assert (levels == 128).all()
    assert (scales > 0).all()


def test_activations_have_their_limits_for_large_inputs(row_kernel):
    product = torch.tensor([[-1e30, -1e3, -40.0, 0.0, 40.0, 1e3, 1e30]])
    for activation in ("gelu", "gelu_pytorch_tanh", "silu", "relu"):
        found = row_kernel.finish(product.clone(), torch.ones(1), None, activation, None, torch.float32)
        expected = torch.tensor([[0, 0, 0, 0, 40, 1e3, 1e30]])
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_have_any_strides(row_kernel, dtype):
    wide = numbers((9, 100), dtype)
    for x in (wide[:, 7:40], wide[::2], wide.T):
        joined = x.clone(memory_format=torch.contiguous_format)
        for strided, whole in zip(row_kernel.quantize(x), row_kernel.quantize(joined), strict=True):
            assert torch.equal(strided, whole)
        ones, zeros = torch.ones(len(x)), torch.zeros(x.shape)
        assert torch.equal(row_kernel.finish(zeros, ones, None, None, x, dtype), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_number_of_threads_changes_nothing(row_kernel, dtype):
    x, bias, steps = numbers((1500, 99), dtype), numbers(99), numbers((1500, 4, 2), torch.bfloat16)
    nibbles = torch.randint(256, (1500, 4, 16), dtype=torch.uint8)
    found = []
    for count in (1, 2, 5):
        with threads(count):
            levels, scales = row_kernel.quantize(x)
            product = row_kernel.finish(levels.float(), scales, bias, "gelu", x, dtype)
            eight = row_kernel.unpack_8_bits(levels.view(torch.int8), scales, dtype)
            four = row_kernel.unpack_4_bits(nibbles, steps, 99, dtype)
            found.append((levels, scales, product, eight, four))
    for other in found[1:]:
        assert all(torch.equal(left, right) for left, right in zip(found[0], other, strict=True))


@settings(max_examples=30)
@given(shapes, dtypes)
def test_nothing_beyond_the_results_is_written(row_kernel, shape, dtype):
    made = []

    def beside_canaries(size, dtype=torch.float32):
        size = [size] if isinstance(size, int) else size
        made.append(torch.full((math.prod(size) + 64,), 77).to(dtype))
        return made[-1][32:-32].view(size)

    x = numbers(shape, dtype)
    with mock.patch.object(rows.torch, "empty", beside_canaries):
        levels, scales = row_kernel.quantize(x)
        row_kernel.finish(levels.float(), scales, None, "silu", x, dtype)
        row_kernel.unpack_8_bits(levels.view(torch.int8), scales, dtype)
        groups = -(-shape[1] // 32)
        nibbles = levels.new_zeros(shape[0], groups, 16)
        row_kernel.unpack_4_bits(nibbles, numbers((shape[0], groups, 2), torch.bfloat16), shape[1], dtype)
    assert len(made) == 4 + (dtype == torch.bfloat16)
    for whole in made:
        assert (whole[:32] == 77).all()
        assert (whole[-32:] == 77).all()


def test_float32_is_finished_in_place_and_nothing_else_is_written(row_kernel):
    whole = torch.full((5, 33), 2.0)
    found = row_kernel.finish(whole[1:4], torch.ones(3), None, None, None, torch.float32)
    assert found.data_ptr() == whole[1].data_ptr()
    assert (whole == 2).all()


def test_row_kernel_exists_if_the_attention_kernel_does(monkeypatch):
    chosen = rows.kernel.__wrapped__()
    assert (chosen is None) == (native.kernel() is None)
    monkeypatch.setattr(native, "kernel", lambda: None)
    assert rows.kernel.__wrapped__() is None


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
