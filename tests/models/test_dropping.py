"""A model with dropped attention modules or blocks equals Hugging Face's model with the modules bypassed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import prefill, random_sequences, write_sentence_transformer
from core_reference import FLOAT32, SIXTEEN_BITS
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    DatabaseRefused,
    InvalidInput,
    Outcome,
    PrefillEngine,
    UnsupportedModel,
    build_database,
    find_checkpoint,
    find_variant,
)
from attncache_core.checkpoints.checkpoint import DroppedLayers
from attncache_core.models import load_model, model_shape
from attncache_core.models.linear import PackedLinear
from benchmarks.papers.shared_maps import lazyformer_blocks, shared_maps_engine

LAYERS = 3


@pytest.fixture(scope="module")
def variant(tiny_checkpoint):
    """A function that makes variants of the tiny model from layer numbers in the format of the options."""
    return lambda attention="", blocks="": find_variant(
        str(tiny_checkpoint.folder), drop_attention=attention, drop_block=blocks
    )


@pytest.fixture(scope="module")
def pruned(variant, tiny_corpus, tmp_path_factory):
    """A model without the attention of layer 1, its engine without reuse, and its database."""
    checkpoint = variant("1")
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    folder = tmp_path_factory.mktemp("databases") / "pruned.db"
    options = BuildOptions(heads="all", threshold=0.0, prototypes=0, training_steps=20)
    build_database(engine, tiny_corpus, folder, options)
    return checkpoint, engine, folder


def means_without(reference, dropped, sequences):
    """Return the mean states of Hugging Face's model with some modules bypassed."""
    return np.stack([reference.hidden_without(ids, dropped).mean(dim=0).numpy() for ids in sequences])


def embeddings(checkpoint, sequences):
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    return prefill(engine, sequences, reuse=False).outputs


# What remains of each layer. At least one layer keeps its attention.
kinds = st.tuples(*[st.sampled_from(["whole", "attention", "block"])] * LAYERS).filter(
    lambda chosen: "whole" in chosen
)


@settings(max_examples=20)
@given(chosen=kinds, lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4))
def test_outputs_are_the_references_with_the_modules_bypassed(
    tiny_checkpoint, tiny_reference, chosen, lengths
):
    attention, blocks = (
        frozenset(number for number in range(LAYERS) if chosen[number] == kind)
        for kind in ("attention", "block")
    )
    dropped = DroppedLayers(attention, blocks)
    checkpoint = replace(tiny_checkpoint, dropped=dropped)
    assert model_shape(checkpoint) == (chosen.count("whole"), 4)
    sequences = random_sequences(lengths)
    expected = means_without(tiny_reference, dropped, sequences)
    np.testing.assert_allclose(embeddings(checkpoint, sequences), expected, atol=FLOAT32, rtol=0)


def test_nothing_dropped_is_the_model_itself(variant, tiny_checkpoint, tiny_reference):
    checkpoint = variant()
    assert checkpoint == find_checkpoint(str(tiny_checkpoint.folder))
    assert checkpoint.variant == {}
    assert checkpoint.fingerprint() == tiny_checkpoint.fingerprint()
    sequences = random_sequences([5, 17, 5])
    expected = tiny_reference.means(sequences)
    np.testing.assert_allclose(embeddings(checkpoint, sequences), expected, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize(
    ("attention", "blocks", "part"),
    [("1", "", "layer.1.attention."), ("", "1", "layer.1."), ("0,2", "", "layer.2.attention.")],
)
def test_dropped_parts_are_never_computed(tmp_path, attention, blocks, part):
    """The weights of the dropped parts are NaN, which would spread to every output."""
    write_sentence_transformer(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        if part in name:
            weight.fill_(torch.nan)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sequences = random_sequences([4, 11])
    assert np.isnan(embeddings(find_variant(str(tmp_path)), sequences)).any()
    checkpoint = find_variant(str(tmp_path), drop_attention=attention, drop_block=blocks)
    assert np.isfinite(embeddings(checkpoint, sequences)).all()


@pytest.mark.parametrize(
    ("attention", "blocks", "packs"), [("", "", 12), ("0", "", 10), ("", "2", 8), ("0", "2", 6)]
)
def test_dropped_parts_are_not_packed(variant, monkeypatch, attention, blocks, packs):
    """A layer packs four linear layers: projections, output, up and down."""
    packed = []
    make = PackedLinear.__init__
    monkeypatch.setattr(
        PackedLinear, "__init__", lambda *arguments: packed.append(arguments) or make(*arguments)
    )
    load_model(variant(attention, blocks), torch.float32)
    assert len(packed) == packs


@pytest.mark.parametrize("written", ["1,0", "0,1", "0-1", "0,0-1,1"])
def test_a_list_of_layers_is_a_set(variant, written):
    assert variant(written).variant == {"dropped_attention": [0, 1]}
    assert variant(written).fingerprint() == variant("0,1").fingerprint()


def test_every_variant_has_a_fingerprint_of_its_own(variant):
    variants = [variant(), variant("1"), variant("2"), variant("", "1"), variant("1", "2"), variant("1,2")]
    assert len({checkpoint.fingerprint() for checkpoint in variants}) == len(variants)
    assert len({checkpoint.embedding_fingerprint() for checkpoint in variants}) == len(variants)


@pytest.mark.parametrize(
    ("attention", "blocks", "field", "words"),
    [
        ("3", "", "drop_attention", "layers 0 to 2"),
        ("", "0-7", "drop_block", "layers 0 to 2"),
        ("-1", "", "drop_attention", "written like"),
        ("", "1,", "drop_block", "written like"),
        ("first", "", "drop_attention", "written like"),
        ("2-1", "", "drop_attention", "upwards"),
        ("0,1", "1,2", "drop_attention", "layer 1 is dropped with its whole block"),
        ("0-2", "", "drop_attention", "at least one layer must keep its attention"),
        ("", "0-2", "drop_block", "at least one layer must keep its attention"),
        ("0", "1,2", "drop_attention", "at least one layer must keep its attention"),
    ],
)
def test_layers_that_cannot_be_dropped_are_refused_by_name(variant, attention, blocks, field, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        variant(attention, blocks)
    assert caught.value.field == field


def test_missing_layers_are_refused_when_the_model_is_loaded(tiny_checkpoint):
    checkpoint = replace(tiny_checkpoint, dropped=DroppedLayers(blocks=frozenset({-1})))
    with pytest.raises(InvalidInput, match="layers 0 to 2"):
        load_model(checkpoint, torch.float32)


def test_recorded_texts_hit_themselves_with_the_pruned_models_outputs(pruned, tiny_corpus, tiny_reference):
    checkpoint, full, folder = pruned
    database = AttentionDatabase.open(folder)
    assert database.mask.reused == (4, 4)
    assert database.verify() == []
    engine = PrefillEngine.load(checkpoint, database=database, dtype="float32")
    sequences = engine.tokenize([sentence.text for sentence in tiny_corpus[::12]])
    served = prefill(engine, sequences)
    assert set(served.outcomes) == {Outcome.HIT}
    expected = prefill(full, sequences, reuse=False).outputs
    np.testing.assert_allclose(served.outputs, expected, atol=SIXTEEN_BITS, rtol=0)
    reference = means_without(tiny_reference, checkpoint.dropped, sequences)
    np.testing.assert_allclose(served.outputs, reference, atol=SIXTEEN_BITS, rtol=0)


@pytest.mark.parametrize(("attention", "blocks"), [("", ""), ("2", ""), ("", "1"), ("1", "2"), ("1,2", "")])
def test_a_database_serves_the_variant_it_was_built_for_and_no_other(pruned, variant, attention, blocks):
    database = AttentionDatabase.open(pruned[2])
    with pytest.raises(DatabaseRefused, match="layers dropped"):
        PrefillEngine.load(variant(attention, blocks), database=database, dtype="float32")


def test_neighbouring_layers_of_a_pruned_model_can_share_maps(variant):
    """Only layers with attention count, so layers 0 and 2 are adjacent."""
    checkpoint = variant("1")
    sequences = random_sequences([9, 4])
    alone, shared = (
        prefill(
            shared_maps_engine(checkpoint, lazyformer_blocks(2, size), dtype="float32"), sequences
        ).outputs
        for size in (1, 2)
    )
    np.testing.assert_allclose(alone, embeddings(checkpoint, sequences), atol=FLOAT32, rtol=0)
    assert abs(alone - shared).max() > 100 * FLOAT32


def test_engine_and_database_report_the_dropped_layers(pruned):
    checkpoint, engine, folder = pruned
    assert engine.info().variant == {"dropped_attention": [1]} == checkpoint.variant
    assert AttentionDatabase.open(folder).manifest.build["variant"] == {"dropped_attention": [1]}


def test_unsupported_family_is_refused_before_its_layers_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bart"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="family 'bart'"):
        find_variant(str(tmp_path), drop_attention="1")
