"""Attention of packed sequences, by the kernel and by torch operators, against the textbook formula."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from core_models import READERS, attention_by, needs_bfloat16
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attncache_core import native
from attncache_core.models.attention import (
    AttentionMask,
    apply_maps,
    attend,
    attend_blocks,
    attend_by_maps,
    attention_maps,
    product_dtype,
)
from attncache_core.text.prefix_tree import shared_prefixes

SCALE = 0.3
# float32 sums in another order: rows of a map sum to 1, and contexts have magnitude 1.
FLOAT32 = 1e-5
# bfloat16 has 8 bits of precision: scores have magnitude 3, and contexts have magnitude 1.
BFLOAT16 = 0.05
# A value that no context has.
CANARY = -768.0
# From 80 tokens on, maps have another dtype. The kernel works in steps of 16 and 32.
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([79, 80, 81, 191, 192, 193, 256]))


def projected(tokens, heads=3, width=4, dtype=torch.float32):
    """Make Q, K and V [tokens, heads, width], as adjacent views of one projection."""
    generator = torch.Generator().manual_seed(tokens)
    joined = torch.randn(tokens, 3 * heads, width, generator=generator) * 1.5
    return joined.to(dtype).split(heads, dim=1)


def by_formula(query, key, value, bounds=(None, None)):
    """Return (maps [h, L, L], context [L, h, d]) of one sequence in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    scores = SCALE * torch.einsum("phd,qhd->hpq", query, key)
    maps = scores.masked_fill(~cells_of(len(query), *bounds), -torch.inf).softmax(dim=-1)
    return maps, torch.einsum("hpq,qhd->phd", maps, value)


def cells_of(length, before, after):
    """Return whether token p attends to token q, bool [L, L], p by q."""
    distance = np.arange(length) - np.arange(length)[:, None]  # q - p
    seen = np.ones((length, length), dtype=bool)
    if before is not None:
        seen &= distance >= -before
    if after is not None:
        seen &= distance <= after
    return torch.from_numpy(seen)


def offsets_of(lengths, first=0):
    return first + np.concatenate(([0], np.cumsum(lengths)))


def contexts_by_formula(query, key, value, offsets, bounds=(None, None)):
    """Return the contexts [tokens, h, d] of packed sequences in float64."""
    parts = [[x[a:b] for x in (query, key, value)] for a, b in pairwise(offsets.tolist())]
    return torch.cat([by_formula(*part, bounds)[1] for part in parts])


def attended(query, key, value, offsets):
    context = torch.full(value.shape, CANARY, dtype=value.dtype)
    attend(query, key, value, offsets, AttentionMask(SCALE), context)
    return context


BOUNDS = st.one_of(st.none(), st.integers(0, 30))


@pytest.mark.parametrize("computing", [*READERS, "maps"])
@settings(max_examples=40)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=5),
    bounds=st.tuples(BOUNDS, BOUNDS),
    around=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
@example([5, 5, 5, 7, 5, 5], (None, None), (0, 0))
@example([1, 40, 79], (None, 0), (0, 0))
@example([1, 40, 200], (15, 0), (1, 2))
@example([1, 200], (16, 16), (3, 0))
def test_contexts_are_the_formulas_within_the_bounds_of_the_mask_and_nothing_else_is_written(
    computing, lengths, bounds, around
):
    before, after = around
    tokens = before + sum(lengths) + after
    query, key, value = projected(tokens)
    attention_mask, offsets = AttentionMask(SCALE, *bounds), offsets_of(lengths, first=before)
    whole = torch.full((tokens, 7, 4), CANARY)
    context = whole[:, 2:5]
    if computing == "maps":
        attend_by_maps(lambda q, k: attention_maps(q, k, attention_mask), query, key, value, offsets, context)
    else:
        with attention_by(computing):
            attend(query, key, value, offsets, attention_mask, context)
    expected = contexts_by_formula(query, key, value, offsets, bounds)
    torch.testing.assert_close(context[before : tokens - after].double(), expected, atol=FLOAT32, rtol=0)
    assert (context[:before] == CANARY).all()
    assert (context[tokens - after :] == CANARY).all()
    assert (whole[:, [0, 1, 5, 6]] == CANARY).all()


@given(st.integers(1, 40), BOUNDS, BOUNDS)
def test_masked_pairs_are_none_if_every_token_attends_to_all(length, before, after):
    masked = AttentionMask(SCALE, before, after).masked(length)
    expected = ~cells_of(length, before, after)
    assert (masked is None) == (not expected.any())
    assert masked is None or torch.equal(masked, expected)


@needs_bfloat16
@pytest.mark.parametrize("computing", READERS)
@pytest.mark.parametrize("width", [4, 32])
def test_sixteen_bit_context_is_close(computing, width):
    query, key, value = projected(296, width=width, dtype=torch.bfloat16)
    offsets = offsets_of([1, 16, 79, 200])
    with attention_by(computing):
        found = attended(query, key, value, offsets)
    expected = contexts_by_formula(query, key, value, offsets)
    torch.testing.assert_close(found.double(), expected, atol=BFLOAT16, rtol=0)


class KernelThatSupportsNothing:
    def supports(self, _):
        return False


def test_tensors_that_the_kernel_does_not_support_are_computed_by_operators(monkeypatch):
    monkeypatch.setattr(native, "kernel", KernelThatSupportsNothing)
    query, key, value = projected(12)
    found = attended(query.double(), key.double(), value.double(), offsets_of([4, 8]))
    expected = contexts_by_formula(query, key, value, offsets_of([4, 8]))
    torch.testing.assert_close(found, expected, atol=FLOAT32, rtol=0)


@settings(max_examples=40)
@given(st.integers(1, 3), LENGTHS, st.tuples(BOUNDS, BOUNDS))
def test_maps_follow_the_formula(n, length, bounds):
    query, key, value = (part.unflatten(0, (n, length)) for part in projected(n * length))
    found = attention_maps(query, key, AttentionMask(SCALE, *bounds))
    expected = torch.stack([by_formula(*row, bounds)[0] for row in zip(query, key, value, strict=True)])
    torch.testing.assert_close(found.double(), expected, atol=FLOAT32, rtol=0)


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
    found = attention_maps(query[None], key[None], AttentionMask(SCALE))
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


@pytest.mark.parametrize("computing", READERS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (4, 4)])
@pytest.mark.parametrize("damaged", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_all_tokens_that_attend_to_a_damaged_token_are_not_finite(computing, dtype, bounds, damaged, number):
    lengths = [1, 3, 16, 17, 40, 100]
    parts = {name: x.clone() for name, x in zip(("query", "key", "value"), projected(177), strict=True)}
    for token in (0, 2, 10, 20, 50, 120):  # one of each sequence
        parts[damaged][token, 1, 3] = number
    parts = {name: x.to(dtype) for name, x in parts.items()}
    attention_mask, offsets = AttentionMask(SCALE, *bounds), offsets_of(lengths)
    context = torch.zeros_like(parts["value"])
    with attention_by(computing):
        attend(*parts.values(), offsets, attention_mask, context)
    for first, end in pairwise(offsets.tolist()):
        value, allowed = parts["value"][first:end], cells_of(end - first, *bounds).double()
        maps, _ = by_formula(*(x[first:end] for x in parts.values()), bounds)
        spoilt = (
            ~maps.isfinite().all(dim=-1).T[..., None]
            | torch.einsum("pq,qhd->phd", allowed, (~value.isfinite()).double()).bool()
        )
        assert not context[first:end].isfinite()[spoilt].any()
        assert context[first:end, [0, 2]].isfinite().all()


@pytest.mark.parametrize("computing", READERS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00080, 0x7FFFFFFF])
def test_a_nan_with_any_bits_makes_the_context_nan(computing, bits):
    """0x7FFFFFFF is CUDA's NaN. The approximation of e^x alone would read 0x7FC00080 as -1.5."""
    query, key, value = (x.clone() for x in projected(20, width=24))
    query.view(torch.int32)[5, 1, 3] = bits
    with attention_by(computing):
        context = attended(query, key, value, offsets_of([20]))
    assert context[5, 1].isnan().all()


@pytest.mark.parametrize("computing", READERS)
@pytest.mark.parametrize("as_tree", [False, True])
def test_a_row_whose_scores_are_all_minus_infinity_is_nan(computing, as_tree):
    """As a softmax gives it. As zeros, the row would be a finite answer that is wrong."""
    tree = shared_prefixes([[*range(20)], [*range(10), *range(30, 40)]]).tree
    query, key, value = (x.clone() for x in projected(30))
    query[5, 1], key[:, 1] = -1e20, 1e20  # the product is beyond float32
    context = torch.full(value.shape, CANARY)
    with attention_by(computing):
        if as_tree:
            attend_blocks(query, key, value, tree, AttentionMask(SCALE, after=0), context)
        else:
            attend(query, key, value, offsets_of([30]), AttentionMask(SCALE), context)
    assert context[5, 1].isnan().all()
    assert context.isfinite().sum() == context.numel() - 4
