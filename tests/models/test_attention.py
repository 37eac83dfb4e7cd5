"""Attention of packed sequences, by the kernel and by torch's operators, against the textbook formula."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from core_models import COMPUTING, attention_by, needs_bfloat16
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attncache_core import native
from attncache_core.models.attention import (
    Pattern,
    apply_maps,
    attend,
    attend_by_maps,
    attention_maps,
    product_dtype,
)

SCALE = 0.3
# Rows of a map sum to 1, contexts are of size 1; float32 in another order of sums.
FLOAT32 = 1e-5
# bfloat16 keeps 8 bits of scores of size 3 and of contexts of size 1.
BFLOAT16 = 0.05
# What no context is.
CANARY = -768.0
# 80 tokens choose another dtype for maps that are kept; 16 and 32 are the kernel's own steps.
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([79, 80, 81, 191, 192, 193, 256]))


def projected(tokens, heads=3, width=4, dtype=torch.float32):
    """Q, K and V [tokens, heads, width], side by side in one projection."""
    generator = torch.Generator().manual_seed(tokens)
    joined = torch.randn(tokens, 3 * heads, width, generator=generator) * 1.5
    return joined.to(dtype).split(heads, dim=1)


def by_formula(query, key, value):
    """(maps [h, L, L], context [L, h, d]) of one sequence in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    maps = torch.softmax(SCALE * torch.einsum("phd,qhd->hpq", query, key), dim=-1)
    return maps, torch.einsum("hpq,qhd->phd", maps, value)


def offsets_of(lengths, first=0):
    return first + np.concatenate(([0], np.cumsum(lengths)))


def contexts_by_formula(query, key, value, offsets):
    """[tokens, h, d] of packed sequences in float64."""
    return torch.cat([by_formula(query[a:b], key[a:b], value[a:b])[1] for a, b in pairwise(offsets.tolist())])


def attended(query, key, value, offsets):
    context = torch.full(value.shape, CANARY, dtype=value.dtype)
    attend(query, key, value, offsets, Pattern(SCALE), context)
    return context


@pytest.mark.parametrize("computing", COMPUTING)
@settings(max_examples=40)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=5), before=st.integers(0, 3), after=st.integers(0, 3))
@example([5, 5, 5, 7, 5, 5], 0, 0)
def test_context_of_each_sequence_is_the_formulas_and_no_other_token_is_written(
    computing, lengths, before, after
):
    tokens = before + sum(lengths) + after
    query, key, value = projected(tokens)
    offsets = offsets_of(lengths, first=before)
    with attention_by(computing):
        context = attended(query, key, value, offsets)
    expected = contexts_by_formula(query, key, value, offsets)
    torch.testing.assert_close(context[before : tokens - after].double(), expected, atol=FLOAT32, rtol=0)
    assert (context[:before] == CANARY).all()
    assert (context[tokens - after :] == CANARY).all()


BOUNDS = st.one_of(st.none(), st.integers(0, 30))


def cells_of(length, before, after):
    """Whether token p sees token q, bool [L, L]."""
    distance = np.arange(length) - np.arange(length)[:, None]  # q - p
    seen = np.ones((length, length), dtype=bool)
    if before is not None:
        seen &= distance >= -before
    if after is not None:
        seen &= distance <= after
    return torch.from_numpy(seen)


@pytest.mark.parametrize("computing", COMPUTING)
@settings(max_examples=40)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=4), before=BOUNDS, after=BOUNDS)
@example([1, 40, 79], None, 0)
@example([1, 40, 200], 15, 0)
@example([1, 200], 16, 16)
def test_a_token_attends_to_those_of_its_pattern_only(computing, lengths, before, after):
    query, key, value = projected(sum(lengths))
    pattern, offsets = Pattern(SCALE, before, after), offsets_of(lengths)
    context = torch.empty(value.shape)
    with attention_by(computing):
        attend(query, key, value, offsets, pattern, context)
    for first, last in pairwise(offsets.tolist()):
        q, k, v = (x[first:last].double() for x in (query, key, value))
        scores = SCALE * torch.einsum("phd,qhd->hpq", q, k)
        maps = scores.masked_fill(~cells_of(last - first, before, after), -torch.inf).softmax(dim=-1)
        expected = torch.einsum("hpq,qhd->phd", maps, v)
        torch.testing.assert_close(context[first:last].double(), expected, atol=FLOAT32, rtol=0)
        kept = attention_maps(query[None, first:last], key[None, first:last], pattern)[0]
        torch.testing.assert_close(kept.double(), maps, atol=FLOAT32, rtol=0)


@given(st.integers(1, 40), BOUNDS, BOUNDS)
def test_what_a_pattern_hides_is_told_only_where_something_is_hidden(length, before, after):
    hidden = Pattern(SCALE, before, after).hidden(length)
    expected = ~cells_of(length, before, after)
    assert (hidden is None) == (not expected.any())
    assert hidden is None or torch.equal(hidden, expected)


@settings(max_examples=20)
@given(st.lists(LENGTHS, min_size=1, max_size=5))
def test_attention_by_way_of_maps_is_attention(lengths):
    query, key, value = projected(sum(lengths))
    context, expected = torch.empty(value.shape), torch.empty(value.shape)
    pattern, offsets = Pattern(SCALE, after=0), offsets_of(lengths)
    attend_by_maps(lambda q, k: attention_maps(q, k, pattern), query, key, value, offsets, context)
    attend(query, key, value, offsets, pattern, expected)
    torch.testing.assert_close(context, expected, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("computing", COMPUTING)
def test_context_goes_to_the_heads_it_is_given_and_to_no_others(computing):
    query, key, value = projected(20)
    whole = torch.full((20, 7, 4), CANARY)
    with attention_by(computing):
        attend(query, key, value, offsets_of([12, 8]), Pattern(SCALE), whole[:, 2:5])
    expected = contexts_by_formula(query, key, value, offsets_of([12, 8]))
    torch.testing.assert_close(whole[:, 2:5].double(), expected, atol=FLOAT32, rtol=0)
    assert (whole[:, [0, 1, 5, 6]] == CANARY).all()


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("width", [4, 32])
def test_strided_views_of_a_packed_projection_give_what_copies_give(computing, width):
    views = projected(208, width=width)
    assert not any(view.is_contiguous() for view in views)
    offsets = offsets_of([8, 200])
    with attention_by(computing):
        found = attended(*views, offsets)
        expected = attended(*(view.contiguous() for view in views), offsets)
    torch.testing.assert_close(found, expected, atol=FLOAT32, rtol=0)


@needs_bfloat16
@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("width", [4, 32])
def test_sixteen_bit_context_is_close(computing, width):
    query, key, value = projected(296, width=width, dtype=torch.bfloat16)
    offsets = offsets_of([1, 16, 79, 200])
    with attention_by(computing):
        found = attended(query, key, value, offsets)
    expected = contexts_by_formula(query, key, value, offsets)
    torch.testing.assert_close(found.double(), expected, atol=BFLOAT16, rtol=0)


class KernelThatTakesNothing:
    def takes(self, _):
        return False


def test_what_the_kernel_does_not_take_is_computed_by_operators(monkeypatch):
    monkeypatch.setattr(native, "kernel", KernelThatTakesNothing)
    query, key, value = projected(12)
    found = attended(query.double(), key.double(), value.double(), offsets_of([4, 8]))
    expected = contexts_by_formula(query, key, value, offsets_of([4, 8]))
    torch.testing.assert_close(found, expected, atol=FLOAT32, rtol=0)


@settings(max_examples=40)
@given(st.integers(1, 3), LENGTHS)
def test_maps_that_are_kept_follow_the_formula_and_so_does_what_is_made_of_them(n, length):
    query, key, value = (part.unflatten(0, (n, length)) for part in projected(n * length))
    found = attention_maps(query, key, Pattern(SCALE))
    context = apply_maps(found, value)
    for row in range(n):
        maps, expected = by_formula(query[row], key[row], value[row])
        torch.testing.assert_close(found[row].double(), maps, atol=FLOAT32, rtol=0)
        torch.testing.assert_close(context[row].double(), expected, atol=FLOAT32, rtol=0)


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
def test_sixteen_bit_maps_are_close_and_in_the_product_dtype_of_their_length(length, dtype):
    query, key, value = projected(length, dtype=torch.bfloat16)
    maps, context = by_formula(query, key, value)
    found = attention_maps(query[None], key[None], Pattern(SCALE))
    made = apply_maps(found, value[None])
    assert found.dtype is made.dtype is product_dtype(length, value.dtype) is dtype
    torch.testing.assert_close(found[0].double(), maps, atol=BFLOAT16, rtol=0)
    torch.testing.assert_close(made[0].double(), context, atol=BFLOAT16, rtol=0)


@pytest.mark.parametrize("value", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maps", [torch.float32, torch.bfloat16])
def test_values_are_multiplied_in_the_dtype_of_the_maps(maps, value):
    made = apply_maps(torch.full((1, 2, 3, 3), 0.25, dtype=maps), torch.ones(1, 3, 2, 4, dtype=value))
    assert made.dtype is maps
    assert (made == 0.75).all()


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
@pytest.mark.parametrize("before_and_after", [(None, None), (None, 0), (4, 4)])
@pytest.mark.parametrize("damaged", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_by_all_that_attend_to_it(
    computing, dtype, before_and_after, damaged, number
):
    lengths = [1, 3, 16, 17, 40, 100]
    parts = {name: x.clone() for name, x in zip(("query", "key", "value"), projected(177), strict=True)}
    for place in (0, 2, 10, 20, 50, 120):  # a token of each sequence
        parts[damaged][place, 1, 3] = number
    parts = {name: x.to(dtype) for name, x in parts.items()}
    pattern, offsets = Pattern(SCALE, *before_and_after), offsets_of(lengths)
    context = torch.zeros_like(parts["value"])
    with attention_by(computing):
        attend(*parts.values(), offsets, pattern, context)
    for first, end in pairwise(offsets.tolist()):
        query, key, value = (x[first:end].double() for x in parts.values())
        scores = SCALE * torch.einsum("phd,qhd->hpq", query, key)
        hidden = pattern.hidden(end - first)
        hidden = torch.zeros(end - first, end - first, dtype=torch.bool) if hidden is None else hidden
        maps = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        spoilt = (
            ~maps.isfinite().all(dim=-1).T[..., None]
            | torch.einsum("pq,qhd->phd", (~hidden).double(), (~value.isfinite()).double()).bool()
        )
        assert not context[first:end].isfinite()[spoilt].any()
        assert context[first:end, [0, 2]].isfinite().all()


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00080, 0x7FFFFFFF])
def test_a_nan_of_any_bits_is_no_number_in_a_row_of_a_map(computing, bits):
    """The last one is CUDA's; e^x took the middle one for -1.5."""
    query, key, value = (x.clone() for x in projected(20, width=24))
    query.view(torch.int32)[5, 1, 3] = bits
    with attention_by(computing):
        context = attended(query, key, value, offsets_of([20]))
    assert context[5, 1].isnan().all()
