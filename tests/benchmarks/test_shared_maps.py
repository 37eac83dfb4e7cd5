"""LazyFormer and SAN give the outputs of the reference with shared maps, and compute no other maps."""

from unittest import mock

import numpy as np
import pytest
import torch
from core_models import attention_by, needs_bfloat16, prefill, random_sequences
from core_reference import FLOAT32
from families import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from attncache_core import native
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.vectors import cosines
from attncache_core.models.prepacked import PackedLinear
from benchmarks.papers.shared_maps import (
    jensen_shannon,
    layer_divergences,
    lazyformer_blocks,
    san_blocks,
    shared_maps_engine,
)

LAYERS, HEADS, HIDDEN, INTERMEDIATE = 3, 4, 32, 64
# Blocks of the tiny model, and for each layer the layer whose maps it takes.
BLOCKS = {
    "LazyFormer": ([range(2), range(2, 3)], [0, 0, 2]),
    "LazyFormer of 3": ([range(3)], [0, 0, 0]),
    "a last block": ([range(1), range(1, 3)], [0, 1, 1]),
}
many_lengths = st.lists(
    st.one_of(st.integers(1, 24), st.sampled_from([31, 32, 79, 80, 200])), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def engines(tiny_checkpoint):
    return {
        name: shared_maps_engine(tiny_checkpoint, blocks, dtype="float32")
        for name, (blocks, _) in BLOCKS.items()
    }


@pytest.mark.parametrize(
    ("computing", "name"), [("operators", "LazyFormer"), *(("stack", name) for name in BLOCKS)]
)
@settings(max_examples=15)
@given(lengths=many_lengths)
def test_outputs_equal_the_reference_with_the_maps_of_the_first_layer_of_each_block(
    engines, tiny_reference, name, computing, lengths
):
    sequences = random_sequences(lengths, seed=sum(lengths))
    with attention_by(computing):
        result = prefill(engines[name], sequences)
    makers = BLOCKS[name][1]
    for found, ids in zip(result.outputs, sequences, strict=True):
        # Only one layer gives maps, and all layers before it are as in the full model, so its maps are too.
        maps = tiny_reference.maps(ids)
        replaced = {
            (layer, head): maps[makers[layer], head]
            for layer in range(LAYERS)
            for head in range(HEADS)
            if makers[layer] != layer
        }
        hidden = tiny_reference.hidden_with_maps(ids, replaced)
        np.testing.assert_allclose(found, hidden.mean(dim=0).numpy(), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("model", ["tiny_checkpoint", "tiny_classifier_checkpoint"])
def test_blocks_of_one_layer_are_the_full_model(request, model):
    checkpoint = request.getfixturevalue(model)
    sequences = random_sequences([7, 1, 30, 7, 100, 2])
    blocks = lazyformer_blocks(LAYERS, size=1)
    found = prefill(shared_maps_engine(checkpoint, blocks, dtype="float32"), sequences)
    full = prefill(PrefillEngine.load(checkpoint, dtype="float32"), sequences, reuse=False)
    # Shared maps run layer by layer, and their sums differ in rounding from the one call of an exact batch.
    np.testing.assert_allclose(found.outputs, full.outputs, atol=FLOAT32, rtol=0)
    assert found.outcomes == full.outcomes
    assert found.report.tokens == 147
    assert 0 < found.report.attention_seconds < found.report.forward_seconds


@pytest.mark.parametrize("family", ["mpnet", "gemma2"])
def test_layers_with_other_scores_than_products_share_maps_without_the_kernel(tmp_path, family):
    checkpoint = read_checkpoint(CASES[family].written(tmp_path))
    engine = shared_maps_engine(checkpoint, [range(LAYERS)], dtype="float32")
    sequences = random_sequences([12, 5, 12])
    with attention_by("operators"):
        expected = prefill(engine, sequences).outputs
    with attention_by("kernel"):
        np.testing.assert_allclose(prefill(engine, sequences).outputs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", BLOCKS)
def test_layers_with_reused_maps_project_only_v(engines, name):
    products = []

    def counted(linear, x, residual=None):
        products.append((len(x), linear.outputs))
        return product(linear, x, residual)

    product = PackedLinear.__call__
    with mock.patch.object(PackedLinear, "__call__", counted):
        prefill(engines[name], random_sequences([5, 11]))
    expected = [
        [(3 if maker == layer else 1) * HIDDEN, HIDDEN, INTERMEDIATE, HIDDEN]
        for layer, maker in enumerate(BLOCKS[name][1])
    ]
    assert products == [(16, outputs) for layer in expected for outputs in layer]


@pytest.mark.parametrize("name", BLOCKS)
def test_kernel_computes_maps_once_per_block_and_reads_them_for_other_layers(engines, name):
    with attention_by("kernel"):
        spy = mock.Mock(wraps=native.kernel())
        with mock.patch.object(native, "kernel", return_value=spy):
            prefill(engines[name], random_sequences([5, 9, 5]))
    kept, applied = [], 0
    for call, _, options in spy.mock_calls:
        if call == "attend":
            kept.append("kept" in options)
        applied += call == "apply_maps"
    # The maps of a layer in a block of its own are not written to memory.
    assert kept == [len(block) > 1 for block in BLOCKS[name][0]]
    assert applied == LAYERS - len(kept)


@needs_bfloat16
def test_default_model_in_bfloat16_keeps_the_direction_of_its_embeddings(default_checkpoint):
    random = np.random.default_rng(0)
    sequences = [random.integers(1000, 30000, length).tolist() for length in (7, 300, 3, 32, 7, 1)]
    exact, found = (
        prefill(shared_maps_engine(default_checkpoint, lazyformer_blocks(6), dtype=dtype), sequences).outputs
        for dtype in ("float32", "bfloat16")
    )
    # The loss from 8 bits of each activation, as in the full model.
    assert cosines(found, exact).min() >= 0.9995


def test_lazyformer_blocks_have_two_layers():
    assert lazyformer_blocks(6) == [range(2), range(2, 4), range(4, 6)]
    assert lazyformer_blocks(5) == [range(2), range(2, 4), range(4, 5)]
    assert lazyformer_blocks(3, size=1) == [range(1), range(1, 2), range(2, 3)]


def test_san_blocks_join_neighbours_below_the_threshold():
    divergences = np.array([0.1, 0.3, 0.2, 0.2])
    assert san_blocks(divergences, 0.3) == [range(2), range(2, 5)]
    assert san_blocks(divergences, 0.15) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert san_blocks(divergences, 1.0) == [range(5)]
    assert san_blocks(np.zeros(2), 0.0) == lazyformer_blocks(3, size=1)  # the full model


@settings(max_examples=10)
@given(st.lists(st.one_of(st.integers(1, 12), st.just(40)), min_size=1, max_size=5))
def test_divergences_of_layers_equal_scipy(tiny_engine, tiny_reference, lengths):
    sequences = random_sequences(lengths, seed=len(lengths))
    expected = np.zeros(LAYERS - 1)
    for ids in sequences:
        maps = tiny_reference.maps(ids)
        for layer in range(LAYERS - 1):
            pairs = [(maps[layer, head], maps[layer + 1, head]) for head in range(HEADS)]
            rows = [jensenshannon(left.double(), right.double(), axis=1) ** 2 for left, right in pairs]
            # SciPy returns nan for the square root of a negative rounding error.
            expected[layer] += np.mean(np.nan_to_num(rows)) / len(sequences)
    found = layer_divergences(tiny_engine.model, sequences)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_rows_with_sums_other_than_one_are_normalised():
    rows = torch.tensor([[0.25, 0.75]])
    assert float(jensen_shannon(rows, 1.01 * rows)) == pytest.approx(0, abs=1e-9)
