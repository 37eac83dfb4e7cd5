"""The damage of heads and masks against Hugging Face's model, and the rank of the heads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import needs_int8, random_sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.calibration.damage import damage_of_each, joint_damage, model_for_damage, reuse_rank
from attncache_core.calibration.substitution import paired
from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.comparator import Measure
from attncache_core.heads.vectors import normalize
from attncache_core.reuse.maps.manifest import Manifest
from attncache_core.reuse.mask import head_order, mildest_mask

LAYERS, HEADS = 3, 4  # of the tiny model
LENGTHS = [5, 9, 5]


def joint_of(engine, probes, donors, on_pass=lambda *_: None) -> np.ndarray:
    comparable = engine.decisions.comparator(Measure.COSINE).comparable
    return joint_damage(engine.model, paired(engine.model, probes, donors), comparable, on_pass)


@pytest.fixture(scope="module")
def measured(tiny_engine):
    return joint_of(tiny_engine, random_sequences(LENGTHS, seed=5), random_sequences(LENGTHS, seed=6))


@pytest.fixture(scope="module")
def moves(tiny_reference):
    """The move of Hugging Face's unit output if each head alone is reused, [probes, heads, hidden]."""
    probes, donors = random_sequences(LENGTHS, seed=5), random_sequences(LENGTHS, seed=6)
    found = []
    for probe, donor in zip(probes, donors, strict=True):
        maps = tiny_reference.maps(donor)
        full = unit(tiny_reference.hidden(probe))
        alone = [unit(tiny_reference.hidden_with_maps(probe, {head: maps[head]})) for head in sorted(maps)]
        found.append([changed - full for changed in alone])
    return np.array(found)


def unit(hidden: torch.Tensor) -> np.ndarray:
    mean = hidden.double().mean(dim=0).numpy()
    return mean / np.linalg.norm(mean)


def test_joint_damage_of_two_heads_is_half_the_mean_product_of_their_moves(measured, moves):
    """So the damage of a head alone is 1 - cosine, and that of a mask is a sum over its pairs of heads."""
    expected = np.einsum("pid,pjd->ij", moves, moves) / len(moves) / 2
    np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=2e-6)
    alone = np.diagonal(expected).reshape(LAYERS, HEADS)
    np.testing.assert_allclose(damage_of_each(measured, LAYERS), alone, rtol=1e-3, atol=1e-6)
    assert alone.min() > 1e-5
    # The moves of different heads are correlated.
    assert abs(measured - np.diag(np.diagonal(measured))).max() > 1e-3
    # No mask has negative damage.
    np.testing.assert_allclose(measured, measured.T, rtol=1e-12)
    assert np.linalg.eigvalsh(measured).min() > -1e-12


def test_damage_depends_neither_on_the_order_of_the_probes_nor_on_batches_and_progress_reaches_its_end(
    tiny_engine,
):
    probes, donors = (random_sequences([5, 9, 7, 5], seed=seed) for seed in (5, 6))
    seen = []
    damage = joint_of(tiny_engine, probes, donors, lambda done, total: seen.append((done, total)))
    assert seen == [(done, LAYERS) for done in range(1, LAYERS + 1)]
    np.testing.assert_allclose(damage, joint_of(tiny_engine, probes[::-1], donors[::-1]), atol=1e-6)
    model, comparable = tiny_engine.model, tiny_engine.decisions.comparator(Measure.COSINE).comparable
    parts = [*paired(model, probes[:1], donors[:1]), *paired(model, probes[1:], donors[1:])]
    np.testing.assert_allclose(damage, joint_damage(model, parts, comparable), atol=1e-6)


def test_damage_is_measured_on_the_callers_comparable_outputs(tiny_engine):
    probes, donors = (random_sequences([5, 9], seed=seed) for seed in (5, 6))

    def first_half(outputs):
        return normalize(outputs[:, :16])

    batches = paired(tiny_engine.model, probes, donors)
    assert not np.allclose(
        joint_damage(tiny_engine.model, batches, first_half), joint_of(tiny_engine, probes, donors), rtol=0.01
    )


@st.composite
def joints(draw):
    """Draw a symmetric matrix of whole numbers, which sum exactly in any order, and a number of layers."""
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    size = layers * heads
    values = draw(st.lists(st.integers(-6, 6), min_size=size**2, max_size=size**2))
    half = np.array(values, dtype=np.float64).reshape(size, size)
    return half + half.T, layers


def greedy(joint: np.ndarray, allowed) -> list[int]:
    """Return all heads in greedy order: each does the least damage together with the heads before it.

    allowed: returns the candidates, given the heads chosen so far.
    """
    chosen: list[int] = []
    while len(chosen) < len(joint):
        forms = {head: joint[np.ix_([*chosen, head], [*chosen, head])].sum() for head in allowed(chosen)}
        chosen.append(min(forms, key=lambda head: (forms[head], head)))
    return chosen


@settings(max_examples=100)
@given(joints())
def test_rank_equals_that_of_a_greedy_search_by_brute_force_and_masks_are_nested(table):
    joint, layers = table
    expected = greedy(joint, lambda chosen: set(range(len(joint))) - set(chosen))
    rank = reuse_rank(joint, layers)
    assert rank.shape == (layers, len(joint) // layers)
    assert np.argsort(rank, axis=None).tolist() == expected
    assert sorted(rank.flat) == list(range(len(joint)))
    for count in range(1, len(joint) + 1):
        assert set(rank[mildest_mask(rank, count).as_array()]) == set(range(count))


@settings(max_examples=100)
@given(joints(), st.data())
def test_rank_keeps_the_order_of_the_records_in_each_layer(table, data):
    joint, layers = table
    heads = len(joint) // layers
    order = [data.draw(st.permutations(range(heads))) for _ in range(layers)]

    def next_of_each_layer(chosen):
        queues = [[layer * heads + head for head in order[layer]] for layer in range(layers)]
        left = [[head for head in queue if head not in chosen] for queue in queues]
        return [queue[0] for queue in left if queue]

    rank = reuse_rank(joint, layers, order)
    assert np.argsort(rank, axis=None).tolist() == greedy(joint, next_of_each_layer)
    assert head_order(rank) == tuple(map(tuple, order))


@needs_int8
def test_heads_of_an_int8_model_are_ranked_like_those_of_the_unquantized_model(
    tiny_checkpoint, tiny_engine, tiny_corpus, tmp_path
):
    manifests = []
    for engine in (tiny_engine, engine_of(tiny_checkpoint, Quantization.INT8)):
        folder = tmp_path / f"{len(manifests)}.db"
        build_database(engine, tiny_corpus, folder, BuildOptions(heads="6", training_steps=5))
        manifests.append(Manifest.read(folder))
    whole, rounding = manifests
    assert whole.fingerprint != rounding.fingerprint
    assert np.array(whole.damage).min() > 0
    np.testing.assert_allclose(rounding.damage, whole.damage, rtol=1e-6)
    assert rounding.rank == whole.rank


@pytest.mark.parametrize("kind", [None, Quantization.INT8_WEIGHT_ONLY, Quantization.INT4])
def test_damage_of_models_without_int8_activations_is_measured_on_the_engines_model(tiny_checkpoint, kind):
    engine = engine_of(tiny_checkpoint, kind)
    assert model_for_damage(engine) is engine.model


def engine_of(checkpoint, quantization) -> PrefillEngine:
    return PrefillEngine.load(replace(checkpoint, quantization=quantization), dtype="float32")
