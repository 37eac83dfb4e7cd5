"""A packed layer computes what torch's layer computes; other modules are not packed."""

import pytest
import torch
from core_models import needs_bfloat16
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from attncache_core.models.linear import ActivatedLinear, packed
from attncache_core.models.prepacked import ACTIVATIONS, PackedLinear, with_round_rows
from attncache_core.native import products

# Sums of 24 products of magnitude 1, in another order.
TOLERANCE = 1e-5

PLAIN = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class Doubled(nn.Linear):
    """A subclass of nn.Linear that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def layer_and_input(rows=7, kind=nn.Linear):
    torch.manual_seed(0)
    return kind(24, 16).requires_grad_(False), torch.randn(rows, 24)


@given(st.integers(1, 20_000))
def test_round_number_of_rows_is_a_little_above_and_the_added_rows_are_zeros(rows):
    x = with_round_rows(torch.ones(rows, 1))
    assert rows <= len(x) <= rows + max(7, rows / 32)
    assert x[:rows].all()
    assert not x[rows:].any()
    assert len(with_round_rows(x)) == len(x)


def test_round_numbers_of_rows_are_few():
    def round_numbers(rows):
        return {len(with_round_rows(torch.empty(count, 0))) for count in rows}

    assert len(round_numbers(range(1, 513))) == 64
    assert len(round_numbers(range(513, 1025))) == 32
    assert len(round_numbers(range(8193, 16385))) == 32


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 33])
def test_products_that_are_not_compiled_are_the_same(monkeypatch, name, rows):
    monkeypatch.setattr(products, "library", lambda: None)
    layer, x = layer_and_input(rows)
    expected = PLAIN[name](layer(x)) if name else layer(x)
    linear = PackedLinear(layer.weight, layer.bias, name)
    assert linear.packed is None
    torch.testing.assert_close(linear(x), expected, atol=TOLERANCE, rtol=0)
    if name is None:
        residual = torch.randn(rows, 16)
        torch.testing.assert_close(linear(x, residual), expected + residual, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
def test_residual_is_added_and_not_modified(kind):
    layer, x = layer_and_input(kind=kind)
    residual = torch.randn(7, 16)
    before = residual.clone()
    torch.testing.assert_close(packed(layer)(x, residual), layer(x) + before, atol=TOLERANCE, rtol=0)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_activation_is_the_one_of_its_name(name, kind):
    layer, x = layer_and_input(kind=kind)
    found = packed(layer, name, ACT2FN[name])(x)
    torch.testing.assert_close(found, PLAIN[name](layer(x)), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (nn.Linear, None, PackedLinear),
        (nn.Linear, "gelu", PackedLinear),
        (nn.Linear, "relu", PackedLinear),
        (nn.Linear, "gelu_pytorch_tanh", PackedLinear),
        (nn.Linear, "silu", PackedLinear),
        (nn.Linear, "swish", ActivatedLinear),
        (Doubled, "gelu", ActivatedLinear),
        (Doubled, None, ActivatedLinear),
    ],
)
def test_only_the_plain_layer_with_a_fusable_activation_is_packed(kind, name, expected):
    layer, _ = layer_and_input(kind=kind)
    assert type(packed(layer, name, ACT2FN[name] if name else None)) is expected


@needs_bfloat16
@pytest.mark.parametrize("name", [None, "gelu", "relu", "gelu_pytorch_tanh"])
def test_sixteen_bit_layer_is_close_to_the_32_bit_one(name):
    layer, x = layer_and_input()
    expected = PLAIN[name](layer(x)) if name else layer(x)
    found = PackedLinear(layer.weight.bfloat16(), layer.bias.bfloat16(), name)(x.bfloat16())
    # Inputs, weights and result have 8 bits: errors of 2^-8 of numbers up to 3, in sums of 24 terms.
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0)
