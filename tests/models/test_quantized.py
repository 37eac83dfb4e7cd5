"""A quantised layer computes its formula, and computes each row independently of the others."""

import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from core_models import layers_output, needs_bfloat16, needs_int8, write_sentence_transformer
from families import CASES, DECODERS, FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from attncache_core import native
from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.errors import UnsupportedModel
from attncache_core.heads.vectors import cosines
from attncache_core.models import linear, load_model, quantized
from attncache_core.models.linear import packed, packed_linear, quantizing
from attncache_core.models.prepacked import ACTIVATIONS, PackedLinear
from attncache_core.models.projections import head_rows
from attncache_core.models.quantized import Int4Linear, Int8Linear, Int8WeightOnlyLinear
from attncache_core.models.refitted import last_products, with_last_products
from attncache_core.native import products
from attncache_core.text.token_batch import pack


def by_operators(kind):
    """Return this kind of layer, computing without the compiled kernel."""

    class ByOperators(kind):
        def __call__(self, *arguments):
            with mock.patch.object(native, "kernel", return_value=None):
                return super().__call__(*arguments)

    return ByOperators


WEIGHT_ONLY = [Int8WeightOnlyLinear, Int4Linear]
# tests/native/test_products.py compares int8 with its formula.
LAYERS = [pytest.param(Int8Linear, marks=needs_int8), *WEIGHT_ONLY]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]
# Sums of at most 200 products of magnitude 1, in another order.
TOLERANCE = 1e-4
# bfloat16 has 8 bits of precision, and sums have a magnitude up to 10.
COARSE = 0.1

shapes = st.tuples(st.integers(1, 150), st.integers(1, 200), st.integers(1, 70))  # rows, inputs, outputs


def numbers(rows, inputs, outputs, dtype=torch.float32, seed=0):
    """Make x, weight and bias; the rows of x and weight differ widely in magnitude."""
    torch.manual_seed(seed)
    x = torch.randn(rows, inputs) * torch.logspace(-2, 1, rows)[:, None]
    weight = torch.randn(outputs, inputs) * torch.logspace(-2, 0, outputs)[:, None] / inputs**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outputs).to(dtype)


@settings(max_examples=40)
@given(shapes, st.booleans(), st.integers(0, 100))
def test_int8_weight_only_is_the_product_with_weights_rounded_to_8_bits(shape, has_bias, seed):
    x, weight, bias = numbers(*shape, seed=seed)
    bias = bias if has_bias else None
    step = weight.abs().max(dim=1, keepdim=True).values / 127
    expected = functional.linear(x, (weight / step).round() * step, bias)
    torch.testing.assert_close(Int8WeightOnlyLinear(weight, bias)(x), expected, atol=TOLERANCE, rtol=1e-5)


@settings(max_examples=40)
@given(st.integers(1, 200), st.integers(1, 70), st.integers(0, 100))
def test_int4_weights_are_within_half_a_step_of_their_group(inputs, outputs, seed):
    _, weight, _ = numbers(1, inputs, outputs, seed=seed)
    kept = Int4Linear(weight)(torch.eye(inputs)).T  # [outputs, inputs]
    for first in range(0, inputs, 32):
        # The last group is padded with zeros, which count for its range.
        group = functional.pad(weight[:, first : first + 32], (0, max(0, first + 32 - inputs)))
        span = group.amax(dim=1, keepdim=True) - group.amin(dim=1, keepdim=True)
        off = (kept[:, first : first + 32] - weight[:, first : first + 32]).abs()
        # Half a step is 1/30 of the range. The step and the minimum are also rounded to bfloat16.
        assert (off <= span / 30 + 0.01 * group.abs().amax(dim=1, keepdim=True) + 1e-6).all()


@settings(max_examples=40)
@given(
    st.sampled_from([8, 26, 32, 64]).flatmap(
        lambda width: st.tuples(st.just(width), st.permutations(range(5)) | st.just(range(5)))
    ),
    st.integers(0, 100),
)
def test_int4_weights_do_not_depend_on_the_order_of_heads(heads, seed):
    width, order = heads
    columns = head_rows(list(order), width)
    x, weight, bias = numbers(3, 5 * width, 7, seed=seed)
    plain, ordered = Int4Linear(weight, bias), Int4Linear(weight, bias, None, columns)
    torch.testing.assert_close(ordered.weight, plain.weight[:, columns], atol=0, rtol=0)
    torch.testing.assert_close(ordered(x[:, columns]), plain(x), atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize(
    "quantization", [pytest.param(Quantization.INT8, marks=needs_int8), Quantization.INT4]
)
def test_output_projections_do_not_depend_on_the_order_of_heads(tmp_path, quantization):
    """Neither the layer's own one, nor the one that hits take."""
    folder = write_sentence_transformer(tmp_path, hidden_size=80, num_attention_heads=4)
    checkpoint, order = replace(read_checkpoint(folder), quantization=quantization), (2, 1, 3, 0)
    (plain, *_), (ordered, *_) = (
        load_model(checkpoint, torch.float32, head_order=[heads] * 3, reused_heads=[0] * 3).layers
        for heads in (range(4), order)
    )
    products, columns = last_products(plain), head_rows(order, 20)
    with quantizing(quantization):
        refitted = [with_last_products(layer, products) for layer in (plain, ordered)]
    for one, other in ((plain, ordered), refitted):
        torch.testing.assert_close(other.output.weight, one.output.weight[:, columns], atol=0, rtol=0)
        if one.output.smoothing is not None:
            assert torch.equal(other.output.smoothing, one.output.smoothing[columns])


@settings(max_examples=40)
@given(shapes, st.booleans(), st.integers(0, 100))
def test_int4_is_the_product_with_its_stored_weights(shape, has_bias, seed):
    x, weight, bias = numbers(*shape, seed=seed)
    bias = bias if has_bias else None
    kept = Int4Linear(weight)(torch.eye(shape[1])).T
    expected = functional.linear(x, kept, bias)
    torch.testing.assert_close(Int4Linear(weight, bias)(x), expected, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@settings(max_examples=40)
@given(shape=shapes)
def test_results_are_bit_identical_with_the_kernel_and_without(kind, dtype, shape):
    x, weight, bias = numbers(*shape, dtype)
    assert torch.equal(kind(weight, bias)(x), by_operators(kind)(weight, bias)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_weight_may_be_a_transposed_view(kind, dtype):
    weight, x = torch.randn(24, 40, dtype=dtype), torch.randn(5, 40, dtype=dtype)
    assert torch.equal(kind(weight.T.contiguous().T)(x), kind(weight)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_row_of_a_batch_equals_the_row_alone(kind, dtype):
    x, weight, bias = numbers(100, 96, 48, dtype)
    layer = kind(weight, bias)
    together, alone = layer(x), torch.cat([layer(row[None]) for row in x])
    tolerance = TOLERANCE if dtype == torch.float32 else COARSE
    torch.testing.assert_close(together, alone, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=20)
@given(rows=st.lists(st.integers(0, 47), min_size=1, max_size=60))
def test_selecting_weight_rows_equals_selecting_outputs(kind, rows):
    x, weight, bias = numbers(9, 64, 48)
    chosen = kind(weight[rows], bias[rows])(x)
    torch.testing.assert_close(chosen, kind(weight, bias)(x)[:, rows], atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("rows", [7, 90])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_activation_is_applied_to_the_product(kind, dtype, rows, activation):
    x, weight, bias = numbers(rows, 64, 48, dtype)
    expected = ACTIVATIONS[activation](kind(weight, bias)(x).float())
    found = kind(weight, bias, activation)(x)
    assert found.dtype == dtype
    tolerance = TOLERANCE if dtype == torch.float32 else COARSE
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [7, 90])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_residual_is_added_and_not_modified(kind, dtype, rows):
    x, weight, bias = numbers(rows, 64, 48, dtype)
    residual = torch.randn(rows, 48).to(dtype)
    before = residual.clone()
    layer = kind(weight, bias)
    found = layer(x, residual)
    assert found.dtype == dtype
    tolerance = TOLERANCE if dtype == torch.float32 else COARSE
    torch.testing.assert_close(found, layer(x) + before, atol=tolerance, rtol=tolerance)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("rows", [7, 90])
@needs_bfloat16
@pytest.mark.parametrize("kind", LAYERS)
def test_bfloat16_is_float32_rounded(kind, rows):
    x, weight, bias = numbers(rows, 64, 48, torch.bfloat16)
    expected = kind(weight.float(), bias.float())(x.float())
    found = kind(weight, bias)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=COARSE, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_row_that_is_not_finite_has_no_finite_result(kind, dtype, number, activation):
    x, weight, bias = numbers(9, 40, 24, dtype)
    layer = kind(weight, bias, activation)
    expected = layer(x)
    x[4, 33] = number
    found = layer(x)
    # Float products of an infinity have both signs, and relu turns -inf into 0. The int8 scale becomes NaN.
    of_weights = kind in WEIGHT_ONLY and not x[4].isnan().any()
    assert not found[4].isfinite().all() if of_weights else found[4].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*LAYERS, *map(by_operators, WEIGHT_ONLY)])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_weight_that_is_not_finite_has_no_finite_result(kind, dtype, number):
    x, weight, bias = numbers(9, 40, 24, dtype)
    weight[7, 33] = number
    finite = kind(weight, bias)(x).isfinite()
    assert not finite[:, 7].any()
    assert finite.sum() == 9 * 23


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_of_zeros_result_in_the_bias(kind):
    x, weight, bias = numbers(5, 64, 48)
    weight[3] = 0
    layer = kind(weight, bias)
    torch.testing.assert_close(layer(torch.zeros_like(x)), bias.expand(5, -1))
    torch.testing.assert_close(layer(x)[:, 3], bias[3].expand(5))


@needs_int8
def test_largest_sums_do_not_overflow():
    x, weight = torch.full((40, 8192), 3.0), torch.full((40, 8192), -5.0)
    torch.testing.assert_close(Int8Linear(weight)(x), torch.full((40, 40), -15.0 * 8192))


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cpu", "it was not compiled; or quantize"), ("meta", "the device is meta; or quantize")],
)
def test_int8_is_refused_without_compiled_code(monkeypatch, device, reason):
    monkeypatch.setattr(products, "library", lambda: None)
    monkeypatch.setattr(quantized, "compiled_off", lambda: "it was not compiled")
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        Int8Linear(torch.empty(48, 64, device=device))
    assert caught.value.field == "quantize"


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_follow_the_model_to_another_device(dtype, kind):
    # torch's meta device stands in for a GPU.
    weight, bias, x = (torch.empty(size, dtype=dtype, device="meta") for size in ((48, 70), 48, (7, 70)))
    found = kind(weight, bias, "gelu")(x)
    assert (found.device.type, found.dtype) == ("meta", dtype)


def test_quantisation_ends_with_its_with_block():
    weight = torch.randn(48, 64)
    with quantizing(Quantization.INT4):
        assert type(packed_linear(weight)) is Int4Linear
        with quantizing(None):
            assert type(packed_linear(weight)) is PackedLinear
        assert type(packed(nn.Linear(64, 48), "relu", functional.relu)) is Int4Linear
    assert type(packed_linear(weight)) is PackedLinear


@pytest.mark.parametrize("name", ["quick_gelu", "gelu_new", "tanh"])
def test_activation_that_cannot_be_fused_leaves_no_layer_unquantised(name):
    layer, x = nn.Linear(64, 48), torch.randn(7, 64)
    with quantizing(Quantization.INT4):
        found = packed(layer, name, ACT2FN[name])(x)
    assert torch.equal(found, ACT2FN[name](Int4Linear(layer.weight, layer.bias)(x)))


def embeddings(checkpoint, dtype=torch.float32, **options):
    """Return the embeddings of sequences of several lengths."""
    random = np.random.default_rng(0)
    batch = pack([random.integers(5, 30, length).tolist() for length in (2, 5, 9, 9, 30, 64)])
    model = load_model(checkpoint, dtype, **options)
    hidden = layers_output(model, batch, model.embed(batch))
    return model.outputs(hidden, batch).numpy()


@pytest.mark.parametrize("family", FULL)
@torch.inference_mode()
def test_weights_of_every_kind_of_layer_are_quantised(family, tmp_path):
    checkpoint = read_checkpoint(CASES[family].written(tmp_path))
    full = embeddings(checkpoint)
    cosine = cosines(full, embeddings(replace(checkpoint, quantization=Quantization.INT8_WEIGHT_ONLY)))
    assert np.median(cosine) > 0.99
    assert cosine.max() < 1 - 1e-7


@pytest.mark.parametrize("family", [name for name, case in DECODERS.items() if case.experts])
def test_experts_are_quantised_and_routers_are_not(family, tmp_path, monkeypatch):
    made = []

    class Noted(Int4Linear):
        def __init__(self, weight, *options):
            made.append(weight.numel())
            super().__init__(weight, *options)

    monkeypatch.setattr(linear, "Int4Linear", Noted)
    folder = DECODERS[family].written(tmp_path)
    load_model(replace(read_checkpoint(folder), quantization=Quantization.INT4), torch.float32)
    weights = load_file(folder / "model.safetensors")
    of_layers = {
        name: weight.numel() for name, weight in weights.items() if ".layers." in name and weight.ndim > 1
    }
    routers = [name for name in of_layers if re.search(r"(mlp|moe)\.gate\.|shared_expert_gate", name)]
    assert routers
    assert sum(made) == sum(of_layers.values()) - sum(of_layers[name] for name in routers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("quantization", "least"),
    [
        pytest.param(Quantization.INT8, 0.998, marks=needs_int8),
        (Quantization.INT8_WEIGHT_ONLY, 0.999),
        (Quantization.INT4, 0.95),
    ],
)
@torch.inference_mode()
def test_quantised_model_is_near_the_full_one_and_not_the_same(tiny_checkpoint, quantization, least, dtype):
    full = embeddings(tiny_checkpoint, dtype)
    found = embeddings(replace(tiny_checkpoint, quantization=quantization), dtype)
    assert cosines(full, found).min() > least
    assert (full != found).any(axis=1).all()


@pytest.mark.parametrize(
    "quantization", [pytest.param(Quantization.INT8, marks=needs_int8), Quantization.INT8_WEIGHT_ONLY]
)
@torch.inference_mode()
def test_order_of_heads_changes_nothing(tiny_checkpoint, quantization):
    checkpoint = replace(tiny_checkpoint, quantization=quantization)
    orders = [[2, 0, 3, 1], [3, 2, 1, 0], [0, 2, 1, 3]]
    ordered = embeddings(checkpoint, head_order=orders, reused_heads=(3, 4, 1))
    np.testing.assert_allclose(ordered, embeddings(checkpoint), atol=TOLERANCE)
