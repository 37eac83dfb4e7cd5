"""The projector computes its formula, and gives the same features alone, in a batch and after loading."""

import numpy as np
import pytest
import torch
from scipy.special import erf

from attncache_core.reuse.maps.projector import DIMENSIONS, FeatureProjector
from attncache_core.text.token_batch import pack

HIDDEN, LONGEST = 12, 9
# Features are sums of a few hundred float32 products of size one.
TOLERANCE = 1e-5


@pytest.fixture
def projector():
    torch.manual_seed(3)
    return FeatureProjector(HIDDEN, LONGEST).eval().requires_grad_(False)


def test_features_equal_the_formula_in_numpy(projector):
    x = np.random.default_rng(0).normal(size=(5, 7, HIDDEN))
    weights = {name: tensor.double().numpy() for name, tensor in projector.state_dict().items()}
    expected = np.zeros((5, DIMENSIONS))
    for row, sequence in enumerate(x):
        for position, token in enumerate(sequence):
            inner = weights["token.weight"] @ token + weights["token.bias"]
            gelu = inner * (1 + erf(inner / 2**0.5)) / 2
            expected[row] += gelu @ weights["position"][position]
    features = projector(torch.from_numpy(x).float())
    assert features.shape == (5, DIMENSIONS)
    np.testing.assert_allclose(features, expected, atol=TOLERANCE)


def test_projection_of_a_packed_batch_equals_the_projection_of_single_sequences(projector):
    batch = pack([[1] * length for length in (4, 6, 4, 9, 6, 6)])
    hidden = torch.randn(len(batch.ids), HIDDEN)
    groups = batch.groups()
    for group, features in zip(groups, projector.project(hidden, groups), strict=True):
        assert features.dtype == np.float32
        for row in range(group.count):
            start = group.first_token + row * group.length
            alone = projector(hidden[start : start + group.length][None])
            np.testing.assert_allclose(features[row], alone[0], atol=TOLERANCE)


def test_16_bit_input_is_projected_in_float32(projector):
    x = torch.randn(2, 5, HIDDEN).bfloat16()
    features = projector(x)
    assert features.dtype == torch.float32
    assert torch.equal(features, projector(x.float()))


def test_sequence_longer_than_the_positions_is_an_error(projector):
    with pytest.raises(RuntimeError):
        projector(torch.randn(1, LONGEST + 1, HIDDEN))


def test_loaded_projector_has_the_sizes_and_weights_of_the_saved_one(projector, tmp_path):
    (tmp_path / "projector.safetensors").write_bytes(projector.to_bytes())
    loaded = FeatureProjector.load(tmp_path / "projector.safetensors")
    x = torch.randn(3, LONGEST, HIDDEN)
    assert loaded.max_length == LONGEST
    assert torch.equal(loaded(x), projector(x))
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
