"""Scores with terms of the distance between two tokens, against the formula in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_formulas import SCALE, assert_near, band_of, dtypes, offsets_of, products, rounds_maps
from torch.nn import functional

from attncache_core.native.products import MatrixKind, PackedMatrix, has_pairs
from attncache_core.native.stack import CompiledStack, StackRows
from attncache_core.native.stack_layers import AttentionHalf, DistanceTerm, QueryKeyHeads

POSITIONS = 330
DISTANCES = torch.arange(1 - POSITIONS, POSITIONS)


def log_buckets(exact):
    """Return distances up to `exact` tokens, beyond which buckets grow with the distance."""
    far = exact + ((DISTANCES.abs() / exact).clamp(min=1).log() * exact / 2).long()
    return DISTANCES.sign() * torch.where(DISTANCES.abs() < exact, DISTANCES.abs(), far)


# The row of each distance, before the least row is moved to 0.
BUCKETS = {
    "own rows": DISTANCES,
    "clamped": DISTANCES.clamp(-6, 6),
    "one-sided": DISTANCES.clamp(-2, 40),
    "log buckets": log_buckets(16),
    "few buckets": log_buckets(4),
    "one row": DISTANCES * 0,
    "rows that are left out": DISTANCES.clamp(-20, 20) * 2,
    "any order": torch.randperm(len(DISTANCES), generator=torch.Generator().manual_seed(0)) % 50,
}
PARTS = ("query_term", "key_term")
lengths_of_sequences = st.lists(
    st.one_of(st.integers(1, 20), st.integers(21, 70), st.integers(71, POSITIONS)), min_size=1, max_size=4
)
some_parts = st.lists(st.sampled_from(PARTS), min_size=1, unique=True)


def made_terms(parts, names, heads, width, dtype):
    """Make the distance terms of these names: every number is one of `dtype`."""
    generator, terms = torch.Generator().manual_seed(0), {}
    for part, name in zip(PARTS, names, strict=True):
        rows = BUCKETS[name] - BUCKETS[name].min()
        if part == "query_term":
            rows = rows.flip(0)
        # Rows that no distance has, at the end.
        table = torch.randn(heads, int(rows.max()) + 3, width, generator=generator).to(dtype).float()
        if part in parts:
            terms[part] = DistanceTerm(table, rows)
    return terms


def maps_with_terms(query, key, offsets, terms, before=None, after=None):
    """Yield the maps [heads, L, L] of each sequence, in float64."""
    query, key = query.double(), key.double()
    for first, end in pairwise(offsets.tolist()):
        q, k, length = query[first:end], key[first:end], end - first
        scores = torch.einsum("phd,qhd->hpq", q, k)
        distances = torch.arange(length) - torch.arange(length)[:, None]  # q - p
        if "query_term" in terms:
            term = terms["query_term"]
            of_distance = torch.einsum("phd,hrd->hpr", q, term.table.double())
            scores += of_distance.gather(2, term.rows[distances + POSITIONS - 1].expand_as(scores))
        if "key_term" in terms:
            term = terms["key_term"]
            of_distance = torch.einsum("qhd,hrd->hrq", k, term.table.double())
            scores += of_distance.gather(1, term.rows[POSITIONS - 1 - distances].expand_as(scores))
        beyond = ~band_of(length, before, after)
        yield torch.softmax((SCALE * scores).masked_fill(beyond, float("-inf")), dim=-1)


class Attention:
    """A stack that only attends. A row is V, Q and K of all heads; the context is added to zeros."""

    def __init__(self, library, terms, heads, width, dtype, **more):
        self.size = heads * width
        context = torch.zeros(4 * self.size, self.size)
        context[3 * self.size :] = torch.eye(self.size)
        half = AttentionHalf(
            always=QueryKeyHeads(
                PackedMatrix(library, MatrixKind.WHOLE, torch.eye(3 * self.size, 4 * self.size)),
                range(heads),
                heads,
            ),
            misses=None,
            output=PackedMatrix(library, MatrixKind.WHOLE, context),
            value_heads=range(heads),
            values=heads,
            width=width,
            value_width=width,
            scale=SCALE,
            **terms,
            **more,
        )
        self.stack = CompiledStack(library, [(half, [])], 4 * self.size, dtype=dtype)

    def __call__(self, query, key, value, offsets, threads=1):
        """Return the context, float32 [tokens, heads, width]."""
        rows = [x.flatten(1).float() for x in (value, query, key)]
        hidden = functional.pad(torch.cat(rows, dim=1), (0, self.size))
        positions = np.concatenate([np.arange(end - first) for first, end in pairwise(offsets.tolist())])
        found, _ = self.stack.run(hidden, StackRows(offsets, positions), range(1), threads=threads)
        return found[:, 3 * self.size :].unflatten(1, value.shape[1:])


def made_rows(tokens, heads, width, dtype, seed=0):
    """Make Q, K and V, [tokens, heads, width] each, of numbers of `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(3, tokens, heads, width, generator=generator) * 1.2).to(dtype).unbind()


def own_dtype(kernel, dtype):
    return dtype if has_pairs(kernel.library) else torch.float32


@settings(max_examples=50)
@given(
    lengths=lengths_of_sequences,
    heads=st.integers(1, 3),
    width=st.sampled_from([8, 24, 32, 64]),
    dtype=dtypes,
    parts=some_parts,
    names=st.tuples(*[st.sampled_from(sorted(BUCKETS))] * 2),
    threads=st.integers(1, 4),
)
@example([POSITIONS, 1, 16, 17], 2, 32, torch.bfloat16, PARTS, ("log buckets", "log buckets"), 2)
@example([32, 31, 33], 2, 64, torch.bfloat16, PARTS, ("own rows", "own rows"), 1)
@example([300], 1, 24, torch.bfloat16, PARTS, ("clamped", "few buckets"), 1)
@example([150], 1, 8, torch.float32, PARTS, ("any order", "rows that are left out"), 1)
def test_context_follows_the_formula(kernel, lengths, heads, width, dtype, parts, names, threads):
    dtype = own_dtype(kernel, dtype)
    terms = made_terms(parts, names, heads, width, dtype)
    attention = Attention(kernel.library, terms, heads, width, dtype)
    query, key, value = made_rows(sum(lengths), heads, width, dtype, seed=sum(lengths))
    offsets = offsets_of(lengths)
    found = attention(query, key, value, offsets, threads)
    exact, sizes = products(maps_with_terms(query, key, offsets, terms), value, offsets)
    assert_near(found.to(dtype), exact, sizes, rounds_maps(kernel, dtype, width))


@settings(max_examples=20)
@given(
    lengths=lengths_of_sequences,
    dtype=dtypes,
    before=st.one_of(st.none(), st.integers(0, 40)),
    after=st.one_of(st.none(), st.integers(0, 40)),
)
@example([200, 40], torch.bfloat16, 3, 20)
def test_terms_and_a_window_follow_the_formula(kernel, lengths, dtype, before, after):
    dtype = own_dtype(kernel, dtype)
    terms = made_terms(PARTS, ("log buckets", "own rows"), 2, 32, dtype)
    attention = Attention(kernel.library, terms, 2, 32, dtype, before=before, after=after)
    query, key, value = made_rows(sum(lengths), 2, 32, dtype)
    offsets = offsets_of(lengths)
    found = attention(query, key, value, offsets)
    exact, sizes = products(maps_with_terms(query, key, offsets, terms, before, after), value, offsets)
    assert_near(found.to(dtype), exact, sizes, rounds_maps(kernel, dtype, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 64])
@pytest.mark.parametrize("names", [("own rows", "own rows"), ("log buckets", "few buckets")])
@pytest.mark.parametrize("token", [0, 15, 16, 36])
def test_nan_spreads_to_dependent_results_and_to_no_others(kernel, token, names, width, dtype):
    dtype = own_dtype(kernel, dtype)
    attention = Attention(kernel.library, made_terms(PARTS, names, 2, width, dtype), 2, width, dtype)
    lengths, parts = offsets_of([37, 20]), made_rows(57, 2, width, dtype)
    # The products of the stack with identity matrices spread NaN over a row, so only whole rows can be told.
    for part, spoilt in ((0, [token]), (1, range(37))):
        rows = [x.clone() for x in parts]
        rows[part][token] = float("nan")
        found = attention(*rows, lengths).isnan().flatten(1)
        assert found[list(spoilt)].all()
        assert not found[37:].any()


def test_a_token_without_a_row_is_refused(kernel):
    attention = Attention(
        kernel.library, made_terms(PARTS, ("clamped", "clamped"), 1, 8, torch.float32), 1, 8, torch.float32
    )
    query, key, value = made_rows(POSITIONS + 1, 1, 8, torch.float32)
    assert attention(*(x[:-1] for x in (query, key, value)), offsets_of([POSITIONS])).isfinite().all()
    with pytest.raises(IndexError, match="more tokens than the model has positions"):
        attention(query, key, value, offsets_of([POSITIONS + 1]))
