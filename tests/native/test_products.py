"""Products with packed weights follow float64 formulas, at every level of the kernel."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_formulas import BFLOAT16, CANARY, threads

from attncache_core.models.prepacked import ACTIVATIONS
from attncache_core.native.products import MatrixKind, PackedMatrix, has_pairs, quantize_rows

# The error of sums of 70 products in float32 and of an activation, relative to the sum of the absolute values
# of all terms; the largest error seen is 1e-6.
FLOAT32 = 5e-6
# The activations change no difference by more than this factor.
STEEPEST = 1.2

activations = st.sampled_from([None, *ACTIVATIONS])
# Rows of whole vectors are rounded in other ways than the rest.
widths = st.one_of(st.integers(1, 70), st.sampled_from([64, 128, 192]))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def levels_of(x, smoothing):
    """Return what the formula of the rounding gives for rows of x: levels, scales and zeros, as NumPy arrays.

    All numbers are float32. A product of two of them is exact in float64, and rint rounds ties to even.
    """
    x = x.float().numpy() * (1 if smoothing is None else smoothing.numpy())
    padded = np.append(x, np.zeros((len(x), 1), np.float32), axis=1)
    least, most = padded.min(axis=1), padded.max(axis=1)
    scales = np.maximum((most - least) / np.float32(255), np.float32(1e-30))
    steps = (np.float32(1) / scales).astype(np.float64)
    zeros = np.rint((-least * steps.astype(np.float32)).astype(np.float64)).astype(np.int64)
    levels = np.clip(np.rint(x.astype(np.float64) * steps[:, None]).astype(np.int64) + zeros[:, None], 0, 255)
    return levels, scales, zeros


def plain_product(kind, weight, x, smoothing):
    """Return x @ weight.T and |x| @ |weight|.T as this kind of matrix rounds their numbers, in float64."""
    if kind is MatrixKind.LEVELS:
        levels, scales, zeros = levels_of(x, smoothing)
        weight_levels, of_weight = quantize_rows(
            weight.float() if smoothing is None else weight.float() / smoothing
        )
        whole = torch.from_numpy(levels - zeros[:, None])
        factors = torch.from_numpy(scales)[:, None].double() * of_weight.double()
        exact = (whole @ weight_levels.long().T).double() * factors
        # The integers are exact, so an error is one of the last conversion and products.
        return exact, exact.abs()
    rounded = torch.bfloat16 if kind is MatrixKind.PAIRS else torch.float32
    x, weight = x.to(rounded).double(), weight.to(rounded).double()
    return x @ weight.T, x.abs() @ weight.abs().T


def by_columns(rows):
    """The same numbers, whose neighbours in memory are those of a column."""
    return rows.T.contiguous().T


def assert_follows(found, kind, weight, x, bias, activation, residual, smoothing=None):
    exact, size = plain_product(kind, weight, x, smoothing)
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    exact = ACTIVATIONS[activation](exact) if activation else exact
    allowed = STEEPEST * FLOAT32 * size + 1e-30
    if residual is not None:
        exact, allowed = exact + residual.double(), allowed + FLOAT32 * residual.double().abs()
    if found.dtype is torch.bfloat16:
        allowed = allowed + BFLOAT16 * (exact.abs() + allowed)
    # Not `all(off > allowed)`: a NaN must not pass.
    off = (found.double() - exact).abs()
    assert bool((off <= allowed).all()), f"off by {(off - allowed).max().item()} more than allowed"


@settings(max_examples=80)
@given(
    rows=st.integers(0, 40),
    inputs=widths,
    outputs=st.integers(1, 130),
    activation=activations,
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    dtype=dtypes,
    beside=st.integers(0, 3),
    count=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
@example(13, 67, 129, "gelu", True, True, torch.float32, 0, 1, 0)
@example(20, 64, 96, None, True, False, torch.bfloat16, 0, 2, 1)
@example(1, 1, 1, "relu", False, False, torch.bfloat16, 1, 1, 2)
def test_product_follows_the_formula(
    kernel, kind, rows, inputs, outputs, activation, with_bias, with_residual, dtype, beside, count, seed
):
    weight = numbers(outputs, inputs, seed=seed)
    bias = numbers(outputs, seed=seed + 1) if with_bias else None
    whole = numbers(rows, beside + inputs + beside, seed=seed + 2).to(dtype)
    x = whole[:, beside : beside + inputs]
    residual = numbers(rows, outputs, seed=seed + 3).to(dtype) if with_residual else None
    with threads(count):
        found = PackedMatrix(kernel.library, kind, weight, bias).multiply(x, activation, residual)
    assert (found.shape, found.dtype) == ((rows, outputs), dtype)
    assert_follows(found, kind, weight, x, bias, activation, residual)


def test_activations_have_their_limits_for_large_inputs(kernel):
    identity = PackedMatrix(kernel.library, MatrixKind.WHOLE, torch.ones(1, 1))
    x = torch.tensor([[-1e30, -1e3, -40.0, 0.0, 40.0, 1e3, 1e30]]).T
    for activation in ACTIVATIONS:
        torch.testing.assert_close(identity.multiply(x, activation), x.clamp(min=0), atol=1e-6, rtol=1e-6)


@settings(max_examples=20)
@given(
    rows=st.integers(1, 12),
    inputs=widths,
    outputs=st.integers(1, 40),
    dtype=dtypes,
    size=st.sampled_from([1e-25, 1e-3, 1.0, 1e4, 1e15]),
    shift=st.sampled_from([0, -3, 3, 50]),
    seed=st.integers(0, 1000),
)
def test_smoothing_multiplies_inputs_before_they_are_rounded_and_divides_the_weight(
    kernel, rows, inputs, outputs, dtype, size, shift, seed
):
    weight, smoothing = numbers(outputs, inputs, seed=seed), numbers(inputs, seed=seed).abs() + 0.1
    x = ((numbers(rows, inputs, seed=seed + 1) + shift) * size).to(dtype)
    packed = PackedMatrix(kernel.library, MatrixKind.LEVELS, weight, None, smoothing)
    assert_follows(packed.multiply(x), MatrixKind.LEVELS, weight, x, None, None, None, smoothing)
    steps = (weight / smoothing).abs().amax(dim=1) / 127
    assert ((packed.weight - weight).abs() <= 0.501 * steps[:, None] * smoothing).all()


def test_sums_of_levels_are_exact_where_they_are_largest(kernel):
    weight, x = 0.5 + 0.01 * numbers(50, 5000).clamp(-3, 3), -numbers(9, 5000, seed=1).abs()
    found = PackedMatrix(kernel.library, MatrixKind.LEVELS, weight).multiply(x)
    assert_follows(found, MatrixKind.LEVELS, weight, x, None, None, None)


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_levels_are_exact_up_to_their_end_and_refused_from_there_on(kernel, sign):
    weight, x = sign * torch.ones(3, 33_027), -numbers(9, 33_026, seed=1).abs()
    found = PackedMatrix(kernel.library, MatrixKind.LEVELS, weight[:, :-1]).multiply(x)
    assert_follows(found, MatrixKind.LEVELS, weight[:, :-1], x, None, None, None)
    with pytest.raises(ValueError, match="sum that two halves of a word cannot hold"):
        PackedMatrix(kernel.library, MatrixKind.LEVELS, weight)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_levels_are_as_near_to_the_rows_as_256_levels_can_be(kernel, size):
    x = (numbers(40, 60) + torch.linspace(-4, 4, 40)[:, None]) * size
    found = PackedMatrix(kernel.library, MatrixKind.LEVELS, torch.eye(60)).multiply(x)
    span = x.amax(dim=1).clamp(min=0) - x.amin(dim=1).clamp(max=0)
    # Half a step of the number, and half a step of the zero, which clamps the numbers at the ends.
    assert ((found - x).abs() <= 1.01 * span[:, None] / 255).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("inputs", [33, 64])
def test_only_the_rows_with_nan_or_infinity_change_and_are_not_finite(
    kernel, kind, activation, dtype, number, inputs
):
    weight, x = numbers(50, inputs).abs() + 0.1, numbers(15, inputs, seed=1).to(dtype)
    packed = PackedMatrix(kernel.library, kind, weight, numbers(50))
    expected = packed.multiply(x, activation)
    odd = torch.arange(15) % 10 == 4  # row 14 is not rounded beside others
    x[odd, inputs - 1] = number
    found = packed.multiply(x, activation)
    if kind is MatrixKind.LEVELS or math.isnan(number):
        assert found[odd].isnan().all()
    else:
        # The weights are positive, so every sum is infinite.
        at_infinity = ACTIVATIONS[activation](torch.tensor(number)) if activation else torch.tensor(number)
        assert torch.equal(found[odd].isnan(), at_infinity.isnan().expand(2, 50)) or activation is not None
        assert not (found[odd].isfinite() & (found[odd] != 0)).any()
    assert torch.equal(found[~odd], expected[~odd])


def test_nan_in_a_weight_reaches_its_output_in_every_row(kernel, kind):
    weight = numbers(50, 33)
    weight[17, 5] = torch.nan
    found = PackedMatrix(kernel.library, kind, weight).multiply(numbers(15, 33))
    assert found.isnan().sum(dim=0).tolist() == [15 * (output == 17) for output in range(50)]


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_rows_of_zeros_give_the_activation_of_the_bias(kernel, kind, activation):
    bias = numbers(50)
    found = PackedMatrix(kernel.library, kind, numbers(50, 33), bias).multiply(torch.zeros(9, 33), activation)
    expected = ACTIVATIONS[activation](bias) if activation else bias
    torch.testing.assert_close(found, expected.expand(9, 50), atol=FLOAT32, rtol=0)


def test_weights_of_zeros_give_zeros(kernel, kind):
    packed = PackedMatrix(kernel.library, kind, torch.zeros(50, 33))
    assert not packed.multiply(numbers(9, 33)).any()


@settings(max_examples=25)
@given(
    rows=st.integers(2, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 130),
    activation=activations,
    dtype=dtypes,
    seed=st.integers(0, 1000),
)
def test_row_of_a_batch_is_the_row_alone_to_the_last_bit(
    kernel, kind, rows, inputs, outputs, activation, dtype, seed
):
    packed = PackedMatrix(
        kernel.library, kind, numbers(outputs, inputs, seed=seed), numbers(outputs, seed=seed)
    )
    x = numbers(rows, inputs, seed=seed + 1).to(dtype)
    residual = numbers(rows, outputs, seed=seed + 2)
    cut = seed % rows
    for added in (None, residual):

        def products(first, stop, added=added):
            return packed.multiply(x[first:stop], activation, None if added is None else added[first:stop])

        whole = products(0, rows)
        assert torch.equal(whole, torch.cat([products(row, row + 1) for row in range(rows)]))
        assert torch.equal(whole, torch.cat([products(0, cut), products(cut, rows)]))


@pytest.mark.parametrize("rows", [40, 200, 385])
def test_large_product_is_the_same_on_any_number_of_threads(kernel, kind, rows):
    packed = PackedMatrix(kernel.library, kind, numbers(250, 300), numbers(250))
    x, residual = numbers(rows, 300, seed=1), numbers(rows, 250, seed=2)
    found = []
    for count in (1, 2, 3, 4):
        with threads(count):
            found.append(packed.multiply(x, "gelu", residual))
    found.append(packed.multiply(by_columns(x), "gelu", by_columns(residual)))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_and_bias_come_back(kernel, kind, dtype):
    for outputs, inputs in ((1, 1), (50, 33), (96, 64), (130, 70)):
        weight, bias = numbers(outputs, inputs).to(dtype), numbers(outputs, seed=1).to(dtype)
        packed = PackedMatrix(kernel.library, kind, weight, bias)
        assert (packed.outputs, packed.inputs, packed.bias.dtype) == (outputs, inputs, torch.float32)
        assert torch.equal(packed.bias, bias.float())
        found = packed.weight.float()
        if kind is MatrixKind.LEVELS:
            levels, scales = quantize_rows(weight.float())
            assert torch.equal(found, levels * scales[:, None])
            assert levels.abs().amax(dim=1).eq(127).all()
            assert ((found - weight.float()).abs() <= 0.501 * scales[:, None]).all()
        else:
            expected = weight.bfloat16() if kind is MatrixKind.PAIRS else weight
            assert torch.equal(found, expected.float())
    assert PackedMatrix(kernel.library, kind, numbers(5, 4)).bias is None


def test_packed_weights_do_not_change_with_the_tensors_that_they_were_packed_from(kernel, kind):
    weight, bias, x = numbers(50, 33), numbers(50), numbers(7, 33, seed=1)
    packed = PackedMatrix(kernel.library, kind, weight, bias)
    expected = packed.multiply(x)
    weight.fill_(CANARY), bias.fill_(CANARY)
    assert torch.equal(packed.multiply(x), expected)


def test_pairs_are_refused_where_the_processor_has_none(kernel):
    if has_pairs(kernel.library):
        PackedMatrix(kernel.library, MatrixKind.PAIRS, numbers(5, 4))
    else:
        with pytest.raises(ValueError, match="no products of bfloat16 pairs"):
            PackedMatrix(kernel.library, MatrixKind.PAIRS, numbers(5, 4))


@settings(max_examples=15)
@given(
    rows=st.integers(1, 70),
    outputs=st.sampled_from([1, 15, 47, 48, 49, 383, 385, 1000]),
    size=st.sampled_from([0.1, 5.0, 200.0]),
    threads=st.integers(1, 4),
    dtype=dtypes,
    biased=st.booleans(),
)
@example(33, 800, 5.0, 4, torch.float32, True)
def test_normalizers_are_those_of_a_softmax_over_all_outputs(
    kernel, kind, rows, outputs, size, threads, dtype, biased
):
    weight, x = numbers(outputs, 70), (numbers(rows, 70, seed=1) * size).to(dtype)
    bias = numbers(outputs, seed=2) * size if biased else None
    packed = PackedMatrix(kernel.library, kind, weight, bias)
    found = packed.log_normalizers(x, threads)
    logits, terms = plain_product(kind, weight, x, None)
    logits = logits if bias is None else logits + bias.double()
    allowed = FLOAT32 * (terms.amax(dim=1) + (0 if bias is None else bias.abs().max())) + 1e-5
    assert ((found - logits.logsumexp(dim=1)).abs() <= allowed).all()
    assert torch.equal(found, packed.log_normalizers(by_columns(x), 1))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(found, packed.log_normalizers(x, threads))
    finally:
        torch.set_default_dtype(torch.float32)


def test_normalizers_of_rows_with_nan_or_infinity_are_not_finite(kernel, kind):
    x = numbers(40, 70)
    x[3, 5], x[35, 6] = torch.nan, torch.inf
    found = PackedMatrix(kernel.library, kind, numbers(100, 70)).log_normalizers(x, 2)
    assert (~found.isfinite()).nonzero().flatten().tolist() == [3, 35]
