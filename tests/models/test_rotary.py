"""Rotary positions, by the kernel and by torch operators, against the formula."""

import pytest
import torch
from core_models import READERS, attention_by, needs_bfloat16
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.models.rotary import Rotary


def angles(pairs):
    """Make a function like a rotary module with `pairs` pairs of dimensions, scaled as in YaRN."""
    frequencies = 1 / 100 ** (torch.arange(pairs) / pairs)

    def module(positions):
        turned = (positions[..., None].float() * frequencies).repeat(1, 1, 2)
        return turned.cos() * 1.1, turned.sin() * 1.1

    return module


def by_formula(x, positions, pairs):
    """Rotate x [tokens, h, d] pair by pair, as complex numbers in float64."""
    cos, sin = (table[0, :, None, :pairs].double() for table in angles(pairs)(positions[None]))
    first, second, rest = x.double().split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag, rest], dim=-1)


@pytest.mark.parametrize("computing", READERS)
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    heads=st.integers(1, 5),
    pairs=st.integers(1, 20),
    rest=st.sampled_from([0, 1, 6]),
)
def test_the_rotary_dimensions_of_each_head_rotate_by_the_formula(computing, lengths, heads, pairs, rest):
    positions = torch.cat([torch.arange(length) for length in lengths])
    # Q is a view of a product that also contains K and V, as in a layer.
    product = torch.randn(len(positions), 2 * heads + 1, 2 * pairs + rest)
    before, rotary = product.clone(), Rotary(angles(pairs))
    with attention_by(computing):
        found = rotary(product[:, 1 : heads + 1], positions)
    expected = by_formula(before[:, 1 : heads + 1], positions, pairs)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    others = [0, *range(heads + 1, 2 * heads + 1)]
    assert torch.equal(product[:, others], before[:, others])


@needs_bfloat16
@pytest.mark.parametrize("computing", READERS)
def test_sixteen_bit_numbers_rotate_in_float32_and_are_rounded_once(computing):
    positions = torch.arange(600)
    x = torch.randn(600, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    with attention_by(computing):
        found = Rotary(angles(5))(x.clone(), positions)
    assert found.dtype is torch.bfloat16
    # Where the two products of a rotation nearly cancel, the rounding of float32 shows.
    torch.testing.assert_close(found, by_formula(x, positions, 5).bfloat16(), atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("computing", READERS)
def test_a_sequence_longer_than_all_before_is_rotated_correctly(computing):
    rotary, x = Rotary(angles(4)), torch.randn(1, 2, 8)
    for position in (3, 511, 512, 5000, 7):
        positions = torch.tensor([position])
        with attention_by(computing):
            found = rotary(x.clone(), positions)
        torch.testing.assert_close(found.double(), by_formula(x, positions, 4), atol=1e-5, rtol=0)
