"""Clusters group neighbouring sequences, and mean maps are exact means over the members of clusters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.build.recording import MeanMaps, clusters

DIMENSIONS = 6


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIMENSIONS)).astype(np.float32)


@settings(max_examples=50)
@given(count=st.integers(1, 300), most=st.integers(1, 40), seed=st.integers(0, 9))
def test_cluster_numbers_have_no_gap_and_their_count_is_bounded(count, most, seed):
    assigned = clusters(vectors(count, seed), most)
    assert len(assigned) == count
    assert assigned.dtype == np.int64
    assert np.bincount(assigned).min() > 0
    assert assigned.max() < min(most, max(1, count // 8))
    assert clusters(vectors(count, seed), most).tolist() == assigned.tolist()
    if count >= 8:
        merged = clusters(vectors(count, seed), most, merge_small=True)
        assert merged.shape == (count,)
        assert np.bincount(merged).min() >= 8
        assert assigned.max() >= merged.max()


@given(count=st.integers(1, 15))
def test_few_sequences_are_one_cluster(count):
    assert clusters(vectors(count), 16).tolist() == [0] * count
    assert clusters(np.empty((0, 1), np.float32), 16).tolist() == []


def test_equal_sequences_leave_no_cluster_empty():
    assigned = clusters(np.ones((80, DIMENSIONS), np.float32), 8)
    assert np.unique(assigned).tolist() == list(range(assigned.max() + 1))


def test_separate_clouds_are_separate_clusters():
    centres = np.repeat(np.eye(4, DIMENSIONS) * 100, 16, axis=0)
    assigned = clusters((centres + vectors(64)).astype(np.float32), 4)
    assert {tuple(assigned[cloud * 16 : cloud * 16 + 16]) for cloud in range(4)} == {
        (cluster,) * 16 for cluster in range(4)
    }


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 9), st.data())
def test_mean_maps_are_the_mean_over_the_members_of_the_given_clusters(members, seed, data):
    random = np.random.default_rng(seed)
    layers = [random.random((len(members), heads, 5, 5)).astype(np.float32) for heads in (2, 0, 3)]
    means = MeanMaps()
    for member, cluster in enumerate(members):
        means.add(cluster, [torch.from_numpy(layer[member]) for layer in layers])
    chosen = data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
    for layer, maps in zip(means.of(chosen), layers, strict=True):
        assert layer.dtype == torch.float32
        expected = maps[np.isin(members, chosen)].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(layer, expected, atol=1e-6)


def test_sixteen_bit_maps_are_added_in_float32():
    # In bfloat16, 1 + 1/2048 rounds to 1, so all 1024 small values, whose sum is 0.5, would be lost.
    means = MeanMaps()
    for value in (1.0, *[1 / 2048] * 1024):
        means.add(0, [torch.full((1, 1, 1), value, dtype=torch.bfloat16)])
    (mean,) = means.of([0])
    assert mean.item() == pytest.approx(1.5 / 1025, rel=1e-5)
