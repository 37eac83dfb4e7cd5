"""The compiled stack of a model computes what its layers compute one by one, quantised or not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import attention_by, layers_output, random_sequences, random_text
from families import CASES, FULL
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_models import pooled_by

from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.layers import run_to_outputs
from attncache_core.models import load_model
from attncache_core.native import products
from attncache_core.native.stack import NO_RECORDS, StackRows
from attncache_core.text.token_batch import pack, pack_shared

pytestmark = pytest.mark.skipif(products.library() is None, reason="no compiled products on this processor")

# Norms last, norms first with windows, rotated and normalised heads with shared keys, scores with a bias,
# norms before and after each half, and scores with both distance terms, and with either of them.
FAMILIES = [
    *("bert", "modernbert-local-global", "qwen3", "mpnet", "gemma3", "deberta-shared-buckets"),
    *("deberta-few-positions-narrow-embeddings", "deberta-positions-to-content"),
]
LONGEST = 300
TEXTS = tuple(random_text(np.random.default_rng(number), 40) for number in range(12))  # for calibration
MODES = [("lasttoken",), ("mean",), ("weightedmean", "cls"), ("max", "mean_sqrt_len_tokens")]
FLOAT32 = 1e-4
# Where sums in another order change one level of a row, results differ by steps of levels.
LEVELS, MEDIAN_OF_LEVELS = 1.0, 2e-2

any_lengths = st.lists(st.one_of(st.integers(1, 24), st.integers(25, LONGEST)), min_size=1, max_size=4)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    case = CASES[request.param]
    positions = max(case.made().max_position_embeddings, LONGEST)
    return case.written(tmp_path_factory.mktemp("models"), max_position_embeddings=positions)


@pytest.fixture(scope="module", params=[None, Quantization.INT8])
def model(folder, request):
    checkpoint = replace(read_checkpoint(folder), quantization=request.param, quantization_texts=TEXTS)
    return request.param, load_model(checkpoint, torch.float32, reused_heads=(1, 0, 4))


@settings(max_examples=3)
@given(lengths=any_lengths, seed=st.integers(0, 100))
@example([300, 20], 0)
@example([30] * 12, 1)
@example([1], 2)
def test_the_stack_computes_what_the_layers_compute_one_by_one(model, lengths, seed):
    quantization, loaded = model
    assert loaded.stack is not None
    batch = pack(random_sequences(lengths, seed))
    found = {}
    with torch.inference_mode():
        for computing in ("stack", "kernel"):
            with attention_by(computing):
                embedded = None if computing == "stack" else loaded.embed(batch)  # the stack embeds too
                found[computing] = layers_output(loaded, batch, embedded)
    off = (found["stack"] - found["kernel"]).abs()
    assert off.max() <= (LEVELS if quantization else FLOAT32)
    assert off.median() <= (MEDIAN_OF_LEVELS if quantization else FLOAT32)


@pytest.mark.parametrize("name", sorted({*FULL, *FAMILIES}))
def test_models_of_which_every_part_is_compiled_have_a_stack(tmp_path, name):
    case = CASES[name]
    checkpoint = read_checkpoint(case.written(tmp_path))
    projects = "embedding_size" in case.changes  # of DeBERTa, to the width of the layers
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(checkpoint, dtype)
        assert (model.stack is not None) == case.compiled
        assert (model.compiled_outputs is not None) == (case.compiled and not projects)


@settings(max_examples=8)
@given(lengths=any_lengths, seed=st.integers(0, 100), front=st.integers(0, 40), modes=st.sampled_from(MODES))
def test_one_call_gives_the_outputs_of_the_layers_to_the_last_bit(model, lengths, seed, front, modes):
    loaded = model[1]
    if loaded.compiled_outputs is None:
        pytest.skip("the embedding is not compiled")
    sequences = random_sequences(lengths, seed)
    batches = [pack(sequences)]
    if loaded.is_causal:
        loaded = pooled_by(loaded, *modes)
        shared = random_sequences([40], seed)[0][:front]
        batches.append(pack_shared([shared + ids for ids in sequences]))
    with torch.inference_mode():
        for batch in batches:
            outputs, finite, _ = run_to_outputs(loaded, batch, NO_RECORDS)
            expected = loaded.outputs(layers_output(loaded, batch, None), batch).numpy()
            assert finite.all()
            assert np.array_equal(outputs, expected)


def test_tokens_and_positions_outside_the_tables_are_refused(tmp_path):
    """C reads the tables without a check of its own."""
    model = load_model(read_checkpoint(CASES["mpnet"].written(tmp_path)), torch.float32)
    tables = model.stack._layout.embedding
    layers = range(len(model.layers))
    rows = StackRows(np.array([0, 2]), np.arange(2), ids=np.array([1, 1]), types=np.array([0, 0]))
    wrong = [
        replace(rows, ids=np.array([1, tables.word_count])),
        replace(rows, ids=np.array([-1, 1])),
        replace(rows, types=np.array([0, 1])),
        replace(rows, types=np.array([0, tables.place_count])),
        replace(rows, positions=np.array([0, 10**6])),
    ]
    for changed in wrong:
        with pytest.raises(IndexError, match=r"outside a table|more tokens than"):
            model.stack.run(None, changed, layers)
    assert model.stack.run(None, rows, layers)[0].isfinite().all()
