"""Simulation of masks on one model: traced maps, maps replaced by a donor's, batches of limited size."""

from itertools import pairwise

import numpy as np
from core_models import prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.calibration.substitution import (
    collect_maps,
    paired,
    probed,
    substituted_outputs,
    token_passes,
    traced_forward,
)
from attncache_core.text.token_batch import pack

LAYERS, HEADS = 3, 4  # of the tiny model
# Differences of two float32 kernels over three layers.
TOLERANCE = 1e-5


def sequences(lengths: list[int], seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[2, *random.integers(5, 40, length - 2).tolist(), 3] for length in lengths]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 80))
def test_passes_take_every_index_once_sorted_by_length_within_the_limit(lengths, tokens):
    passes = list(token_passes(lengths, tokens))
    flat = [index for run in passes for index in run]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[index] for index in flat] == sorted(lengths)
    assert all(passes)
    for run in passes:
        assert len(run) == 1 or sum(lengths[index] for index in run) <= tokens
    # A pass is cut only where the next sequence does not fit.
    for run, following in pairwise(passes):
        assert sum(lengths[index] for index in run) + lengths[following[0]] > tokens


def test_trace_gives_the_engines_outputs_and_every_layers_maps(tiny_engine):
    asked = sequences([4, 7, 4, 9], seed=1)
    batch = pack(asked)
    seen = []
    hidden, outputs = traced_forward(
        tiny_engine.model, batch, lambda layer, group, maps: seen.append((layer, group, maps))
    )
    np.testing.assert_allclose(
        batch.in_callers_order(outputs), prefill(tiny_engine, asked, reuse=False).outputs, atol=TOLERANCE
    )
    assert len(hidden) == LAYERS
    assert [(layer, group.length) for layer, group, _ in seen] == [
        (layer, length) for layer in range(LAYERS) for length in (4, 7, 9)
    ]
    for _, group, maps in seen:
        assert maps.shape == (group.count, HEADS, group.length, group.length)
        np.testing.assert_allclose(maps.sum(dim=-1), 1, atol=TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_substituting_a_probes_own_maps_changes_nothing(tiny_engine, data):
    lengths = data.draw(st.lists(st.integers(3, 12), min_size=1, max_size=6))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(LAYERS, HEADS)
    batch = pack(sequences(lengths, seed=2))
    probes = probed(tiny_engine.model, batch, collect_maps(tiny_engine.model, batch))
    changed = substituted_outputs(tiny_engine.model, probes, mask)
    np.testing.assert_allclose(changed, probes.outputs, atol=TOLERANCE)


def test_substituting_another_sentences_maps_changes_the_output_only_if_the_mask_holds_a_head(tiny_engine):
    probes, donors = pack(sequences([6, 6, 8], seed=3)), pack(sequences([6, 6, 8], seed=4))
    measured = probed(tiny_engine.model, probes, collect_maps(tiny_engine.model, donors))
    nothing = np.zeros((LAYERS, HEADS), dtype=bool)
    np.testing.assert_allclose(
        substituted_outputs(tiny_engine.model, measured, nothing), measured.outputs, atol=TOLERANCE
    )
    for layer in range(LAYERS):
        for head in range(HEADS):
            alone = nothing.copy()
            alone[layer, head] = True
            changed = substituted_outputs(tiny_engine.model, measured, alone)
            assert (np.abs(changed - measured.outputs).max(axis=1) > 10 * TOLERANCE).all()
            shortened = substituted_outputs(tiny_engine.model, measured, alone, first_layer=layer)
            np.testing.assert_allclose(shortened, changed, atol=TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(3, 12), min_size=1, max_size=8), st.integers(0, 9))
def test_paired_probes_take_the_maps_of_their_own_donors(tiny_engine, lengths, seed):
    probes, donors = sequences(lengths, seed), sequences(lengths, seed + 100)
    everything = np.ones((LAYERS, HEADS), dtype=bool)
    (make,) = paired(tiny_engine.model, probes, donors)
    together = make()
    outputs = together.batch.in_callers_order(substituted_outputs(tiny_engine.model, together, everything))
    # Packing sorts by length, so row i of the batch is the i-th shortest probe.
    for row, probe in enumerate(np.argsort(lengths, kind="stable")):
        maps = collect_maps(tiny_engine.model, pack([donors[probe]]))
        alone = probed(tiny_engine.model, pack([probes[probe]]), maps)
        expected = substituted_outputs(tiny_engine.model, alone, everything)
        np.testing.assert_allclose(outputs[row], expected[0], atol=TOLERANCE)


def test_many_paired_probes_come_in_batches_of_limited_size(tiny_engine):
    probes, donors = sequences([200] * 30, seed=1), sequences([200] * 30, seed=2)
    sizes = [len(make().batch.lengths) for make in paired(tiny_engine.model, probes, donors)]
    assert sizes == [20, 10]
