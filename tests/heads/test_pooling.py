"""Pooling of packed sequences against plain loops over the tokens of each sequence."""

import numpy as np
import pytest
import torch
from core_models import random_sequences
from core_reference import FLOAT32
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.heads import pooling
from attncache_core.heads.pooling import Pooler
from attncache_core.heads.vectors import normalize
from attncache_core.native import products
from attncache_core.text.token_batch import pack, pack_shared

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def executor(request, monkeypatch):
    """Pool by compiled code, and by torch."""
    if request.param == "torch":
        monkeypatch.setattr(pooling, "pool_states", lambda *_: None)
    return request.param


def pooled_plainly(vectors, mode, skipped):
    """Pool token vectors [L, hidden] to one vector, by the definition of each mode."""
    kept = range(skipped, len(vectors))
    match mode:
        case "cls":
            return vectors[skipped]
        case "lasttoken":
            return vectors[-1]
        case "max":
            return np.array([max(vectors[token, d] for token in kept) for d in range(vectors.shape[1])])
        case "mean":
            return sum(vectors[token] for token in kept) / len(kept)
        case "mean_sqrt_len_tokens":
            return sum(vectors[token] for token in kept) / len(kept) ** 0.5
        case "weightedmean":
            # The weight of a token is its position, counted from one.
            total = sum(token + 1 for token in kept)
            return sum((token + 1) * vectors[token] for token in kept) / total
    raise AssertionError(mode)


@pytest.mark.parametrize("skipped", [0, 3], ids=["whole", "without-prompt"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(4, 30), min_size=1, max_size=6))
def test_pooling_of_packed_sequences_is_that_of_each_alone(mode, skipped, lengths):
    batch = pack(random_sequences(lengths))
    hidden = torch.randn(len(batch.ids), 5, generator=torch.Generator().manual_seed(0))
    found = Pooler((mode,), skipped or None)(hidden, batch).numpy()
    alone = torch.split(hidden.double(), batch.lengths.tolist())
    expected = np.stack([pooled_plainly(vectors.numpy(), mode, skipped) for vectors in alone])
    np.testing.assert_allclose(found, expected, atol=FLOAT32)


@pytest.mark.parametrize("skipped", [0, 3], ids=["whole", "without-prompt"])
@pytest.mark.parametrize("mode", MODES)
def test_sequences_that_share_prefixes_are_pooled_over_all_their_tokens(mode, skipped):
    sequences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4], [1, 2, 3, 4, 7, 8, 9], [1, 2, 3, 9, 9], [8, 7, 6, 5]]
    prompt_tokens = [skipped, 1, skipped, 2, skipped]  # prompt tokens of each sequence
    batch = pack_shared(sequences, prompt_tokens=prompt_tokens)
    assert len(batch.ids) < sum(map(len, sequences))
    hidden = torch.randn(len(batch.ids), 5, generator=torch.Generator().manual_seed(0))
    found = Pooler((mode,), skipped or None)(hidden, batch)
    expected = [
        pooled_plainly(
            hidden[batch.rows(np.full(len(ids), index), np.arange(len(ids)))].double().numpy(),
            mode,
            prompt_tokens[index] if skipped else 0,
        )
        for index, ids in enumerate(sequences)
    ]
    np.testing.assert_allclose(batch.in_callers_order(found.numpy()), np.stack(expected), atol=FLOAT32)


def test_several_modes_are_joined_in_their_order():
    batch = pack(random_sequences([4, 6, 6]))
    hidden = torch.randn(16, 5)
    joined = Pooler(("max", "cls"))(hidden, batch)
    parts = [Pooler((mode,))(hidden, batch) for mode in ("max", "cls")]
    assert joined.shape == (3, 10)
    assert torch.equal(joined, torch.cat(parts, dim=1))


def test_sixteen_bit_vectors_are_averaged_in_float32():
    # 256 + 1 is 256 in bfloat16, so a 16-bit sum would stay at 256.
    batch = pack(random_sequences([512]))
    mean = Pooler(("mean_sqrt_len_tokens",))(torch.ones(512, 2, dtype=torch.bfloat16), batch)
    assert mean.dtype is torch.float32
    np.testing.assert_allclose(mean.numpy(), 512**0.5, rtol=1e-6)


def test_unknown_pooling_mode_is_refused():
    with pytest.raises(ValueError, match="median"):
        Pooler(("median",))(torch.ones(3, 2), pack([[1, 2, 3]]))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_largest_of_numbers_with_nan_is_nan(number):
    states = torch.zeros(3, 37)
    states[1, 5] = number
    found = Pooler(("max",))(states, pack([[0] * 3]))
    assert torch.equal(found, states.amax(dim=0)[None]) or bool(found.isnan()[0, 5])


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_does_not_depend_on_its_batch(mode, executor):
    if mode == "weightedmean" and (executor == "torch" or products.library() is None):
        pytest.skip("torch adds up in another order")
    states = torch.randn(30, 37)
    pooler, batch = Pooler((mode,), 2), pack([[0] * 10])
    together = pooler(states, pack([[0] * 10] * 3))
    for index in range(3):
        assert torch.equal(pooler(states[10 * index : 10 * index + 10], batch)[0], together[index])


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e38, 1e-30, 0.0])  # 1e38: the length is no float32
def test_rows_of_any_size_are_scaled_to_unit_length(scale):
    rows = (np.random.default_rng(0).normal(size=(3, 37)) * scale).astype(np.float32)
    expected = rows.astype(np.float64)
    expected /= np.maximum(np.linalg.norm(expected, axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(normalize(rows), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 5)])
def test_what_is_no_rows_is_not_scaled(shape, dtype):
    with pytest.raises(ValueError, match=r"embeddings must be rows \[n, d\], and have the shape \("):
        normalize(np.ones(shape, dtype))


def test_rows_of_a_list_are_scaled():
    assert normalize([[3.0, 4.0]]).tolist() == [[0.6, 0.8]]
