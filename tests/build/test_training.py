"""Eq. 2 against plain loops, and the effect of training with Eq. 1 and 3 on a small task."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.build.training import ALPHA, PairGroup, map_distances, train_projector
from attncache_core.reuse.maps.projector import FeatureProjector

# Differences of float32 probabilities.
TOLERANCE = 1e-6
HIDDEN = 8


def random_maps(random: np.random.Generator, records: int, heads: int, length: int) -> torch.Tensor:
    """Return probability rows [records, heads, L, L], some of which are nearly one-hot."""
    scores = random.normal(scale=4, size=(records, heads, length, length))
    return torch.from_numpy(scores).softmax(dim=-1).float()


def plain_distance(left: np.ndarray, right: np.ndarray) -> float:
    """Compute Eq. 2 without α row by row: half the L1 distance of two rows, averaged over rows and heads."""
    heads, length, _ = left.shape
    rows = [
        0.5 * sum(abs(float(a) - float(b)) for a, b in zip(left[head, row], right[head, row], strict=True))
        for head in range(heads)
        for row in range(length)
    ]
    return sum(rows) / len(rows)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 4), n=st.integers(1, 4), heads=st.integers(1, 3), length=st.integers(1, 6),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_map_distances_are_equation_2_in_plain_loops(m, n, heads, length, seed):
    random = np.random.default_rng(seed)
    left, right = random_maps(random, m, heads, length), random_maps(random, n, heads, length)
    distances = map_distances(left, right)
    expected = [[plain_distance(a, b) for b in right.numpy()] for a in left.numpy()]
    np.testing.assert_allclose(distances, expected, atol=TOLERANCE)
    np.testing.assert_allclose(map_distances(right, left), distances.T, atol=TOLERANCE)
    assert distances.min() >= 0
    assert distances.max() <= 1 + TOLERANCE
    np.testing.assert_allclose(map_distances(left, left).diagonal(), 0, atol=TOLERANCE)


def test_distance_of_16_bit_maps_is_that_of_their_values():
    maps = random_maps(np.random.default_rng(0), 3, 2, 5).half()
    np.testing.assert_allclose(
        map_distances(maps, maps), map_distances(maps.double(), maps.double()), atol=TOLERANCE
    )


def sentences(count: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [m, L, hidden] and the maps [m, 1, L, L] of a head that reads two hidden dimensions."""
    form = np.zeros((HIDDEN, HIDDEN))
    form[:2, :2] = np.array([[1.0, -0.5], [0.7, 1.0]]) / 2
    inputs = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, length, HIDDEN)))
    scores = inputs @ torch.from_numpy(form) @ inputs.transpose(1, 2)
    return inputs.float(), scores.softmax(dim=-1).float()[:, None]


def groups() -> list[PairGroup]:
    made = [sentences(200, length, seed=length) for length in (3, 4)]
    return [PairGroup(inputs, map_distances(maps, maps)) for inputs, maps in made]


def trained(steps: int, seed: int = 0, on_step=lambda _: None) -> tuple[FeatureProjector, float]:
    torch.manual_seed(seed)
    projector = FeatureProjector(HIDDEN, 6)
    error = train_projector(groups(), projector, steps=steps, seed=seed, on_step=on_step)
    return projector.eval().requires_grad_(False), error


@pytest.fixture(scope="module")
def projector_and_error():
    return trained(150)


def way_to_the_best(projector: FeatureProjector) -> float:
    """Return the improvement of the chosen records over random records, as a share of the best improvement.

    The share is measured on sentences outside the training: 0 for random records, 1 for the best records.
    """
    stored_inputs, stored_maps = sentences(200, 4, seed=50)
    inputs, maps = sentences(100, 4, seed=51)
    true = map_distances(maps, stored_maps)
    nearest = torch.cdist(projector(inputs), projector(stored_inputs)).argmin(dim=1)
    chosen = true[torch.arange(100), nearest].mean()
    return float((true.mean() - chosen) / (true.mean() - true.min(dim=1).values.mean()))


def predicted_to_true(projector: FeatureProjector) -> list[float]:
    """Return, for each length, mean ŷ / mean α y."""
    ratios = []
    for group in groups():
        rows, columns = torch.triu_indices(len(group.inputs), len(group.inputs), offset=1)
        features = projector(group.inputs)
        predicted = torch.cdist(features, features)[rows, columns]
        ratios.append(float(predicted.mean() / (ALPHA * group.distances[rows, columns].mean())))
    return ratios


def test_training_lowers_the_error(projector_and_error):
    _, error = projector_and_error
    _, untrained_error = trained(2)
    assert error < 0.7 * untrained_error


def test_chosen_records_beat_random_ones_and_training_is_why(projector_and_error):
    projector, _ = projector_and_error
    untrained, _ = trained(1)
    assert way_to_the_best(projector) > 0.2
    assert way_to_the_best(projector) > way_to_the_best(untrained) + 0.05


def test_features_predict_alpha_times_the_map_distance_without_a_bias(projector_and_error):
    # Without α the features would be wrong by a factor of five, without the mean distance by three.
    np.testing.assert_allclose(predicted_to_true(projector_and_error[0]), 1, atol=0.1)


def test_same_seed_gives_the_same_projector_and_another_seed_another():
    first, second, other = trained(20)[0], trained(20)[0], trained(20, seed=1)[0]
    assert torch.equal(first.position, second.position)
    assert torch.equal(first.token.weight, second.token.weight)
    assert not torch.equal(first.position, other.position)


def test_every_step_is_reported_once():
    seen = []
    trained(7, on_step=seen.append)
    assert seen == list(range(7))


def test_length_with_a_single_sentence_does_not_disturb_the_others():
    inputs, maps = sentences(1, 5, seed=9)
    torch.manual_seed(0)
    projector = FeatureProjector(HIDDEN, 6)
    alone = PairGroup(inputs, map_distances(maps, maps))
    error = train_projector([alone, *groups()], projector, steps=5)
    assert np.isfinite(error)
    assert torch.isfinite(projector.position).all()


def test_records_with_equal_maps_train_to_finite_features():
    inputs, _ = sentences(5, 4, seed=2)
    torch.manual_seed(0)
    projector = FeatureProjector(HIDDEN, 4)
    train_projector([PairGroup(inputs, torch.zeros(5, 5))], projector, steps=5)
    assert torch.isfinite(projector(inputs)).all()


def test_training_without_a_pair_is_refused():
    inputs, _ = sentences(1, 4, seed=0)
    with pytest.raises(ValueError, match="no two sentences"):
        train_projector([PairGroup(inputs, torch.zeros(1, 1))], FeatureProjector(HIDDEN, 4), steps=1)


def test_training_goes_on_from_a_trained_projector(projector_and_error):
    before, _ = projector_and_error
    assert continued(before, steps=1)[1] < 0.8 * trained(1)[1]
    after, _ = continued(before, steps=20)
    assert all(1 / 1.5 < ratio < 1.5 for ratio in predicted_to_true(after))
    assert way_to_the_best(after) > way_to_the_best(trained(20)[0])


def continued(projector: FeatureProjector, steps: int) -> tuple[FeatureProjector, float]:
    extended = projector.extended(projector.max_length)
    error = train_projector(groups(), extended, steps=steps, is_trained=True)
    return extended.eval().requires_grad_(False), error
