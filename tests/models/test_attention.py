"""Attention of a group against the textbook formula."""

import pytest
import torch
from core_models import needs_bfloat16
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.models.attention import apply_maps, attend, attention_maps, product_dtype

SCALE = 0.3
# Rows of a map sum to 1, contexts are of size 1; float32 in another order of sums.
FLOAT32 = 1e-5
# bfloat16 keeps 8 bits of scores of size 3 and of contexts of size 1.
BFLOAT16 = 0.05
# Around what chooses another dtype or kernel: 80 tokens for products in float32, 192 for SDPA.
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([79, 80, 81, 191, 192, 193, 256]))


def projected(n, length, heads=3, width=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    return (torch.randn(3, n, length, heads, width, generator=generator) * 1.5).to(dtype).unbind()


def by_formula(query, key, value):
    """(maps [n, h, L, L], context [n, h, L, d]) in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    maps = torch.softmax(SCALE * torch.einsum("nphd,nqhd->nhpq", query, key), dim=-1)
    return maps, torch.einsum("nhpq,nqhd->nhpd", maps, value)


@settings(max_examples=40)
@given(st.integers(1, 3), LENGTHS)
def test_maps_and_context_follow_the_formula_at_every_length(n, length):
    query, key, value = projected(n, length)
    maps, context = by_formula(query, key, value)
    torch.testing.assert_close(attention_maps(query, key, SCALE).double(), maps, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(attend(query, key, value, SCALE).double(), context, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(apply_maps(maps.float(), value).double(), context, atol=FLOAT32, rtol=0)


@needs_bfloat16
@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        (1, torch.float32),
        (16, torch.float32),
        (79, torch.float32),
        (80, torch.bfloat16),
        (200, torch.bfloat16),
    ],
)
def test_sixteen_bit_attention_is_close_and_in_the_product_dtype_of_its_length(length, dtype):
    query, key, value = projected(2, length, dtype=torch.bfloat16)
    maps, context = by_formula(query, key, value)
    found = attention_maps(query, key, SCALE)
    assert (
        found.dtype is attend(query, key, value, SCALE).dtype is product_dtype(length, value.dtype) is dtype
    )
    torch.testing.assert_close(found.double(), maps, atol=BFLOAT16, rtol=0)
    torch.testing.assert_close(attend(query, key, value, SCALE).double(), context, atol=BFLOAT16, rtol=0)


@pytest.mark.parametrize("length", [8, 200])
def test_strided_views_of_a_packed_projection_give_what_copies_give(length):
    wide = torch.randn(2, length, 9, 4)
    views = wide.split(3, dim=2)
    expected = attend(*(view.contiguous() for view in views), SCALE)
    torch.testing.assert_close(attend(*views, SCALE), expected, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize(
    ("length", "maps", "value", "product"),
    [
        (3, torch.bfloat16, torch.float32, torch.float32),
        (3, torch.bfloat16, torch.bfloat16, torch.float32),
        (90, torch.float16, torch.bfloat16, torch.bfloat16),
        (90, torch.float32, torch.bfloat16, torch.bfloat16),
        (90, torch.float16, torch.float32, torch.float32),
    ],
)
def test_maps_of_another_dtype_than_the_products_are_refused(length, maps, value, product):
    with pytest.raises(TypeError, match=rf"maps are {maps}, and are multiplied in {product}"):
        apply_maps(torch.ones(1, 2, length, length, dtype=maps), torch.ones(1, length, 2, 4, dtype=value))
