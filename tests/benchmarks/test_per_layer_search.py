"""AttnCache-f: each layer takes the maps of the record that the search of this layer found."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from core_models import COMPUTING, SEAL, attention_by, prefill, random_sequences
from core_reference import FLOAT32, SIXTEEN_BITS, rounded
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core import Outcome, PrefillEngine
from attncache_core.build.training import ALPHA
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.storage.layout import RecordKind, RecordLayout, segment_path
from attncache_core.reuse.storage.segment_file import SegmentWriter
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.text.token_batch import pack
from benchmarks.papers import per_layer_search
from benchmarks.papers.layer_search import LayerSearch, Nearest
from benchmarks.papers.per_layer_search import LayerwiseSearch, train_layerwise_search

LAYERS, HEADS = 3, 4
HEAD_ORDER = ((2, 0, 3, 1), (1, 3, 0, 2), (3, 2, 1, 0))
ALL, SOME = (4, 4, 4), (4, 2, 0)
RECORDED = {
    length: random_sequences([length] * count, seed=length) for length, count in ((4, 20), (7, 30), (33, 6))
}
NEVER, ALWAYS = 1.5, -np.inf


@pytest.fixture(scope="module")
def store_of(tiny_reference, tmp_path_factory):
    """A function that makes a store of the recorded sequences, for the given stored heads of each layer."""

    def store_of(stored_heads):
        folder = tmp_path_factory.mktemp("maps")
        layout = RecordLayout(stored_heads, torch.float16)
        for length, sequences in RECORDED.items():
            with SegmentWriter(segment_path(folder, length), length, len(sequences), layout, SEAL) as writer:
                for ids in sequences:
                    maps = tiny_reference.maps(ids)
                    layers = [
                        torch.stack([maps[layer, head] for head in HEAD_ORDER[layer][:heads]]).half()
                        for layer, heads in enumerate(stored_heads)
                        if heads
                    ]
                    writer.append(layers, ids, RecordKind.STORED)
        return AttentionMapStore(folder, list(RECORDED), layout, SEAL)

    return store_of


@pytest.fixture(scope="module")
def trained(tiny_checkpoint, tiny_engine, store_of):
    """A function that returns an engine for the given stored heads of each layer, trained once."""
    made = {}

    def trained(stored_heads=ALL):
        if stored_heads not in made:
            with pytest.MonkeyPatch.context() as patched:
                # A small limit, so that the records of one length need several passes.
                patched.setattr(per_layer_search, "_TOKENS_PER_PASS", 50)
                strategy = train_layerwise_search(
                    tiny_engine.model, store_of(stored_heads), RECORDED, HEAD_ORDER, steps=40
                )
            made[stored_heads] = PrefillEngine.load(tiny_checkpoint, strategy=strategy, dtype="float32")
        return made[stored_heads]

    return trained


def changed(engine, searches=None, threshold=None, store=None):
    """Return the engine with other searches, another threshold or another store."""
    loaded = engine.strategy
    strategy = LayerwiseSearch(
        loaded.searches if searches is None else searches,
        store or loaded.store,
        HEAD_ORDER,
        loaded.threshold if threshold is None else threshold,
    )
    return replace(engine, strategy=strategy)


def run(engine, sequences):
    """Return the result, and which layers took the maps of a record, bool [sequences, layers]."""
    return prefill(engine, sequences), engine.strategy.layer_hits


def test_threshold_above_one_is_the_full_model(trained, tiny_reference):
    sequences = [*random_sequences([4, 33, 7, 1, 60, 7], seed=1), *RECORDED[7]]
    result, layer_hits = run(changed(trained(SOME), threshold=NEVER), sequences)
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=FLOAT32, rtol=0)
    # There are no records of lengths 1 and 60.
    not_searched = [3, 4]
    assert np.flatnonzero(np.isnan(result.similarities)).tolist() == not_searched
    assert [index for index, o in enumerate(result.outcomes) if o is Outcome.NOT_SEARCHED] == not_searched
    assert result.outcomes.count(Outcome.MISS) == len(sequences) - len(not_searched)
    assert not layer_hits.any()


def test_recorded_sequences_hit_themselves_and_give_the_full_models_outputs(trained, tiny_reference):
    sequences = [ids for of_length in RECORDED.values() for ids in of_length][::-1]
    result, layer_hits = run(trained(SOME), sequences)
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=SIXTEEN_BITS, rtol=0)
    assert set(result.outcomes) == {Outcome.HIT}
    assert (result.similarities > 0.999).all()
    searched = np.array(SOME) > 0
    assert (layer_hits == searched).all()
    assert (result.report.tokens, result.report.corrupt_records) == (sum(map(len, sequences)), 0)
    assert min(result.report.search_seconds, result.report.attention_seconds) > 0
    assert result.report.attention_seconds < result.report.forward_seconds


@dataclass
class Given:
    """A search that returns given records: for each sequence, in the caller's order, a record or -1."""

    records: np.ndarray

    def nearest(self, batch, _):
        records = self.records[batch.order]
        return Nearest(records, np.where(records < 0, 0, 1).astype(np.float32))


# The length of a sequence, and for each layer one of the six records of a length, or -1.
rows = st.tuples(st.sampled_from([4, 7, 33]), st.lists(st.integers(-1, 5), min_size=LAYERS, max_size=LAYERS))


@pytest.mark.parametrize(
    ("computing", "stored_heads"), [("stack", ALL), *((computing, SOME) for computing in COMPUTING)]
)
@settings(max_examples=8)
@given(st.lists(rows, min_size=1, max_size=8))
def test_each_layer_takes_the_maps_of_its_own_record(trained, tiny_reference, computing, stored_heads, asked):
    lengths, records = map(list, zip(*asked, strict=True))
    sequences = random_sequences(lengths, seed=sum(lengths))
    searches = {layer: Given(np.array(records)[:, layer]) for layer in range(LAYERS) if stored_heads[layer]}
    with attention_by(computing):
        result, layer_hits = run(changed(trained(stored_heads), searches), sequences)
    for ids, row, found in zip(sequences, records, result.outputs, strict=True):
        replaced = {}
        for layer, record in enumerate(row):
            if record >= 0:
                maps = rounded(tiny_reference.maps(RECORDED[len(ids)][record]))
                heads = HEAD_ORDER[layer][: stored_heads[layer]]
                replaced |= {(layer, head): maps[layer, head] for head in heads}
        hidden = tiny_reference.hidden_with_maps(ids, replaced)
        np.testing.assert_allclose(found, hidden.mean(dim=0).numpy(), atol=FLOAT32, rtol=0)
    hits = (np.array(records) >= 0) & (np.array(stored_heads) > 0)
    np.testing.assert_array_equal(layer_hits, hits)
    assert [outcome is Outcome.HIT for outcome in result.outcomes] == hits.any(axis=1).tolist()


@torch.inference_mode()
def layer_inputs(reference, ids):
    """Return the input of each layer in the full model, [L, hidden]."""
    return [x[0] for x in reference.model(torch.tensor([ids]), output_hidden_states=True).hidden_states]


def test_projector_of_a_layer_is_trained_on_the_inputs_and_maps_of_the_layer(trained, tiny_reference):
    predicted, true = np.zeros(LAYERS), np.zeros(LAYERS)
    for length, sequences in RECORDED.items():
        inputs = [layer_inputs(tiny_reference, ids) for ids in sequences]
        maps = [tiny_reference.maps(ids) for ids in sequences]
        for layer, search in trained().strategy.searches.items():
            features = search.projector(torch.stack([of_layers[layer] for of_layers in inputs]))
            predicted[layer] += float(torch.pdist(features).sum())
            of_layer = torch.stack(
                [torch.stack([of_heads[layer, head] for head in range(HEADS)]) for of_heads in maps]
            )
            # The total variation distance, averaged over heads and rows (Eq. 2 without the length term).
            true[layer] += float(torch.pdist(of_layer.flatten(1), p=1).sum()) / (2 * HEADS * length)
    # On training pairs, the mean distance of features is α times the mean distance of maps.
    np.testing.assert_allclose(predicted, ALPHA * true, rtol=2e-3)
    assert true.all()


def test_nearest_record_is_the_brute_force_nearest_of_the_same_length():
    torch.manual_seed(0)
    projector = FeatureProjector(8, max_length=9).eval().requires_grad_(False)
    search, stored = LayerSearch(projector), {length: torch.randn(40, length, 8) for length in (3, 9)}
    for inputs in stored.values():
        search.add(inputs)
    batch = pack(random_sequences([9, 3, 5, 9, 3, 3]))
    hidden = torch.randn(len(batch.ids), 8)
    found = search.nearest(batch, hidden)
    for index, (first, length) in enumerate(zip(batch.offsets[:-1], batch.lengths.tolist(), strict=True)):
        if length == 5:
            assert found.records[index] == -1
            assert np.isnan(found.similarities[index])
            continue
        vector = projector(hidden[first : first + length][None])
        distances = (projector(stored[length]) - vector).norm(dim=1)
        assert found.records[index] == int(distances.argmin())
        assert found.similarities[index] == pytest.approx(1 - float(distances.min()), abs=1e-5)


def test_damaged_record_is_not_used_and_is_counted(trained, store_of, tiny_reference):
    store = store_of(ALL)
    segment = store.segments[7]
    with segment.path.open("r+b") as file:
        file.seek(segment.records_start + 2 * segment.layout.record_bytes(7) + 10)
        file.write(b"\xff")
    store = AttentionMapStore(segment.path.parent.parent, list(RECORDED), store.layout, SEAL)
    sequences = RECORDED[7][1:4]
    result, layer_hits = run(changed(trained(), store=store), sequences)
    np.testing.assert_allclose(result.outputs, tiny_reference.means(sequences), atol=SIXTEEN_BITS, rtol=0)
    assert layer_hits.tolist() == [[True] * LAYERS, [False] * LAYERS, [True] * LAYERS]
    assert result.outcomes == (Outcome.HIT, Outcome.MISS, Outcome.HIT)
    assert result.report.corrupt_records == LAYERS  # counted once per layer


def test_sequences_of_other_records_are_refused(tiny_engine, trained):
    for recorded, message in (
        ({7: RECORDED[7][::-1]}, "record 0 of length 7 was made from another"),
        ({33: [*RECORDED[33], RECORDED[33][0]]}, "no 7 records of length 33"),
        ({5: random_sequences([5])}, "no 1 records of length 5"),
        ({4: RECORDED[4][:1], 7: RECORDED[7][:1]}, "no two sentences of one length"),
    ):
        with pytest.raises(ValueError, match=message):
            train_layerwise_search(tiny_engine.model, trained().strategy.store, recorded, HEAD_ORDER)


def test_records_without_a_given_sequence_are_not_used(tiny_engine, trained):
    first = {7: RECORDED[7][:10]}
    strategy = train_layerwise_search(tiny_engine.model, trained().strategy.store, first, HEAD_ORDER, steps=5)
    engine = changed(trained(), strategy.searches, threshold=ALWAYS)
    _, layer_hits = run(engine, [*RECORDED[7][10:], *RECORDED[4]])
    assert layer_hits[:20].all()
    assert not layer_hits[20:].any()
    batch = pack(RECORDED[7][10:])
    with torch.inference_mode():
        hidden = engine.model.embed(batch)
        assert strategy.searches[0].nearest(batch, hidden).records.max() < 10
