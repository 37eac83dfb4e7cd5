"""Chunks that are loaded from disk: the same answers, damage, and layers that run while others are loaded."""

import threading

import numpy as np
import pytest
from blends import OPENING, joined, key_values, loaded, noted_layers, own_full_pass, random_chunks, run_share
from core_decoders import write_llama
from core_models import flip
from kv_models import assert_same, store_of

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine import blended
from attncache_core.reuse.blend.chunks import Recomputation
from attncache_core.reuse.blend.loading import ratio_beside_loading
from attncache_core.reuse.kv.transfer import Loading

LAYERS = 4
NEAR = {"rtol": 0, "atol": 1e-4}
# With the opening, the stored sequences fill whole blocks, or end with a short block.
LENGTHS = [(31, 47, 15), (20, 37, 9)]


@pytest.fixture(scope="module", params=["stack", "plain"])
def model(tmp_path_factory, request):
    folder = write_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)
    return loaded(read_checkpoint(folder), request.param)


def slow_loading(store, share=0.5):
    """Make loading a token take `share` of the time that computing it takes, as far as the store knows."""
    store.transfers.prefill_speed = 1000.0
    store.transfers.load_speed = store.layout.token_bytes * 1000 / share


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_chunks_from_disk_give_the_answer_of_chunks_in_memory(model, open_store, lengths, ratio):
    chunks, query = random_chunks(lengths, 7)
    expected = run_share(model, open_store(), chunks, query, ratio)
    store = open_store()
    for tier in ("disk", "memory"):
        found = run_share(model, store, chunks, query, ratio)
        assert np.array_equal(found.outputs, expected.outputs)
        report = found.blends[0]
        assert report.rows == expected.blends[0].rows
        assert report.computed_tokens == 0
        assert [chunk.cached for chunk in report.chunks] == [chunk.tokens for chunk in report.chunks]
        assert store.counts.given_blocks[tier] == sum(-(-(length + 1) // 16) for length in lengths)


def test_a_chunk_from_disk_stands_beside_chunks_from_memory_and_new_ones(model, open_store):
    chunks, query = random_chunks((31, 20, 40, 9), 7)
    run_share(model, open_store(), chunks[:2], query, 0.0)
    store = open_store()
    run_share(model, store, chunks[2:3], query, 0.0)
    found = run_share(model, store, chunks, query, 0.3)
    assert found.blends[0].computed_tokens == len(OPENING) + 9
    expected = run_share(model, store_of(model), chunks, query, 0.3)
    np.testing.assert_allclose(found.outputs, expected.outputs, **NEAR)
    np.testing.assert_allclose(
        run_share(model, store, chunks, query, 1.0).outputs[0],
        own_full_pass(model, store, joined(chunks, query)[0]),
        **NEAR,
    )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("part", [0, 1, LAYERS - 1, LAYERS])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_damage_is_noticed_and_the_answer_is_that_of_computed_tokens(
    model, open_store, tmp_path, lengths, part, ratio
):
    chunks, query = random_chunks(lengths, 7)
    expected = run_share(model, open_store(), chunks, query, ratio)
    store = open_store()
    name = key_values(store).whole([*OPENING, *chunks[1]], b"").names[1]
    path = tmp_path / "kv" / name.key.hex()[:2] / f"{name.key.hex()}.kv"
    flip(path, 3 - sum(store.layout.part_bytes[part:]), bit=6)
    with noted_layers() as noted:
        found = run_share(model, store, chunks, query, ratio)
    assert store.transfers.disk.counts.damaged == 1
    assert found.finite.all()
    # All layers ran again, behind what is certain. What was not given was computed in its context.
    assert [run.layer for run in noted if not run.only_slots][-LAYERS:] == list(range(LAYERS))
    if ratio == 1:
        full = own_full_pass(model, store, joined(chunks, query)[0])
        np.testing.assert_allclose(found.outputs[0], full, **NEAR)
    else:
        assert min(found.blends[0].rows) >= min(expected.blends[0].rows)
    # The next request computes and stores the chunk.
    assert_same(model, run_share(model, store, chunks, query, ratio).outputs, expected.outputs)
    assert run_share(model, store, chunks, query, ratio).blends[0].computed_tokens == 0
    assert store.transfers.disk.counts.damaged == 1


@pytest.mark.parametrize("lengths", LENGTHS)
def test_layers_are_computed_while_later_layers_are_loaded(model, open_store, monkeypatch, lengths):
    chunks, query = random_chunks(lengths, 7)
    expected = run_share(model, open_store(), chunks, query, 0.3)
    store, events, computed = open_store(), [], [threading.Event() for _ in range(LAYERS)]
    read, run_layers = Loading._read, blended.run_layers

    def waiting(loading, part):
        """Load a layer only when the layer two before it was computed."""
        if 2 <= part < LAYERS:
            assert computed[part - 2].wait(240)
        read(loading, part)
        events.append(("loaded", part))

    def noting(*arguments, slots):
        found = run_layers(*arguments, slots=slots)
        for layer in () if slots.only else arguments[4]:
            events.append(("computed", layer))
            computed[layer].set()
        return found

    monkeypatch.setattr(Loading, "_read", waiting)
    monkeypatch.setattr(blended, "run_layers", noting)
    found = run_share(model, store, chunks, query, 0.3)
    assert np.array_equal(found.outputs, expected.outputs)
    assert {part for event, part in events if event == "loaded"} == {*range(LAYERS + 1)}  # also the state
    for layer in range(LAYERS):
        assert events.index(("loaded", layer)) < events.index(("computed", layer))
    for layer in range(LAYERS - 2):
        assert events.index(("computed", layer)) < events.index(("loaded", layer + 2))


@pytest.mark.parametrize("least", [0.0, 0.1, 0.9])
def test_a_slow_disk_raises_the_share_that_is_computed_again(model, open_store, least):
    chunks, query = random_chunks((31, 47, 15), 7)
    run_share(model, open_store(), chunks, query, 0.0)
    store = open_store()
    slow_loading(store)
    free, loaded = 47 + 15, 32 + 48 + 16
    load_seconds = store.layout.token_bytes * loaded / store.transfers.load_speed
    ratio = ratio_beside_loading(least, load_seconds, store.transfers.prefill_speed, free)
    assert ratio == pytest.approx(max(least, 0.5 * loaded / free))
    from_disk = run_share(model, store, chunks, query, least).blends[0]
    assert list(from_disk.rows) == [len(query) + count for count in Recomputation(ratio).counts(free, LAYERS)]
    from_memory = run_share(model, store, chunks, query, least).blends[0]
    assert list(from_memory.rows) == [
        len(query) + count for count in Recomputation(least).counts(free, LAYERS)
    ]


def test_where_computing_is_faster_than_loading_chunks_are_computed_and_stored_in_memory(model, open_store):
    chunks, query = random_chunks((31, 47, 15), 7)
    expected = run_share(model, open_store(), chunks, query, 0.0)
    store = open_store()
    slow_loading(store, share=2)
    for computed in (32 + 48 + 16, 0):
        found = run_share(model, store, chunks, query, 0.0)
        assert_same(model, found.outputs, expected.outputs)
        assert found.blends[0].rows == (len(query),) * LAYERS
        assert found.blends[0].computed_tokens == computed
        assert [chunk.cached for chunk in found.blends[0].chunks] == ([0, 0, 0] if computed else [32, 47, 15])
    assert not store.counts.given_blocks["disk"]
