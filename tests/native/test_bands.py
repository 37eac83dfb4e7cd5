"""Attention within a band of tokens, for heads of any width."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_formulas import (
    BFLOAT16,
    CANARY,
    FLOAT32,
    addresses,
    assert_near,
    attend,
    band_of,
    bands,
    dtypes,
    joined_projection,
    lengths_of_sequences,
    offsets_of,
    own_maps,
    products,
    rounds_maps,
    threads,
    widths,
)


@st.composite
def attentions(draw):
    """Make arguments of `attend`: heads of any width, and a band."""
    lengths, dtype = draw(lengths_of_sequences), draw(dtypes)
    key_width, width = draw(st.sampled_from([8, 24, 32, 64, 96, 192])), draw(widths)
    heads = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors = [
        # One more head on each side and 8 more elements per head, so tokens and heads are not contiguous.
        torch.randn(sum(lengths), heads + 2, size + 8, generator=generator).to(dtype)[:, 1:-1, :size]
        for size in (key_width, key_width, width)
    ]
    before, after = draw(bands)
    scale = 2 * key_width**-0.5
    return tensors, offsets_of(lengths), scale, {"before": before, "after": after}


@settings(max_examples=100)
@given(attention=attentions(), count=st.sampled_from([1, 2]))
def test_bands_and_widths_follow_the_formula(kernel, attention, count):
    (query, key, value), offsets, scale, band = attention
    kept = [torch.full((query.shape[1], n, n), CANARY, dtype=value.dtype) for n in np.diff(offsets)]
    with threads(count):
        found = attend(kernel, query, key, value, offsets, scale, kept=addresses(kept), **band)
        unkept = attend(kernel, query, key, value, offsets, scale, **band)
    assert torch.equal(found, unkept)
    maps = list(own_maps(query, key, offsets, scale, **band))
    exact, sizes = products(maps, value, offsets)
    rounded = rounds_maps(kernel, value.dtype, query.shape[2], value.shape[2])
    assert_near(found, exact, sizes, rounded)
    for written, expected in zip(kept, maps, strict=True):
        allowed = FLOAT32 + BFLOAT16 * ((value.dtype is torch.bfloat16) + rounded) * expected
        assert bool(((written.double() - expected).abs() <= allowed).all())
        # Elements outside the band are exactly 0.
        assert (written[:, ~band_of(written.shape[1], **band)] == 0).all()


@settings(max_examples=40)
@given(attention=attentions())
def test_band_beyond_the_length_changes_nothing(kernel, attention):
    (query, key, value), offsets, scale, _ = attention
    longest = int(np.diff(offsets).max())
    unbound = attend(kernel, query, key, value, offsets, scale)
    for reach in (longest - 1, longest, 2**31 - 1, 2**40):
        found = attend(kernel, query, key, value, offsets, scale, before=reach, after=reach)
        assert torch.equal(found, unbound)


@settings(max_examples=40)
@given(attention=attentions(), data=st.data())
def test_batch_of_bands_equals_single_sequences_and_heads_bit_for_bit(kernel, attention, data):
    (query, key, value), offsets, scale, band = attention
    together = attend(kernel, query, key, value, offsets, scale, **band)
    number = data.draw(st.integers(0, len(offsets) - 2))
    tokens = slice(*offsets[number : number + 2])
    for head in range(query.shape[1]):
        parts = (x[tokens, [head]] for x in (query, key, value))
        alone = attend(kernel, *parts, offsets_of([tokens.stop - tokens.start]), scale, **band)
        assert torch.equal(alone[:, 0], together[tokens, head])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(None, 0), (20, 0), (0, 30), (0, 0), (33, 16)])
@pytest.mark.parametrize("token", [0, 40, 119])
def test_tokens_outside_the_band_are_ignored(kernel, token, before, after, dtype):
    offsets, parts = offsets_of([120]), joined_projection(120, 1, 32, dtype)
    band = {"before": before, "after": after}
    query, key, value = (part.clone() for part in parts)
    attended = band_of(120, before, after)[:, token]
    key[token] = query[0] * 2.0**20  # a score outside the band must not be a row's maximum
    expected = attend(kernel, *parts, offsets, **band)
    assert torch.equal(attend(kernel, query, key, parts[2], offsets, **band)[~attended], expected[~attended])
    key[token] = float("nan")
    found = attend(kernel, query, key, parts[2], offsets, **band).isnan().all(dim=-1).flatten()
    assert torch.equal(found, attended)
    value[token] = float("nan")
    found = attend(kernel, query, parts[1], value, offsets, **band).isnan().all(dim=-1).flatten()
    assert found[attended].all()
    # Rows of a tile are multiplied by the same rows of V, up to whole vectors or whole tiles of AMX.
    rows, columns = (16, 32) if kernel.level == "avx512_amx" else (8, 16)
    near = band_of(120, None if before is None else before + rows + columns, after + rows)[:, token]
    assert not found[~near].any()
