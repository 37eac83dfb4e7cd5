"""What blended requests take from the store and leave in it."""

import shutil
import threading
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from blends import (
    OPENING,
    block_diagonal,
    joined,
    key_values,
    noted_layers,
    own_full_pass,
    random_chunks,
    run_chunks,
    run_share,
)
from core_models import damage_weights
from kv_models import assert_nothing_is_in_use, assert_same, run, run_behind_another, store_of

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine import blended
from attncache_core.engine.continued import run_continued
from attncache_core.engine.request import PrefillRequest
from attncache_core.models import load_model
from attncache_core.reuse.blend.chunks import Blend, Recomputation
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS

LAYERS = 3
NEAR = {"rtol": 0, "atol": 1e-4}


@torch.inference_mode()
def run_exactly(model, store, ids):
    """Run a sequence behind what is stored of it, and store it, as an exact request does."""
    request = PrefillRequest(ids, False, prefix_key=key_values(store).whole(ids[:-1], b""))
    return run_continued(model, store, [request], [0])


def blocks(*lengths):
    return sum(-(-length // BLOCK_TOKENS) for length in lengths)


def test_the_first_and_every_later_request_give_the_same_answer_to_the_last_bit(model, store):
    chunks, query = random_chunks((20, 37, 9, 16), 7)
    for ratio in (0.0, 0.15, 0.6, 1.0):
        store.clear()
        first, *later = (run_share(model, store, chunks, query, ratio) for _ in range(3))
        for other in later:
            assert np.array_equal(first.outputs, other.outputs)
            assert first.blends[0].rows == other.blends[0].rows


def test_what_else_was_in_the_batch_that_stored_a_chunk_changes_nothing(model):
    chunks, query = random_chunks((20, 37, 9, 16), 7)
    together, one_by_one = store_of(model), store_of(model)
    for chunk in chunks:
        run_share(model, one_by_one, [chunk], [5], 0.0)
    expected = run_share(model, together, chunks, query, 0.3)
    found = run_share(model, one_by_one, chunks, query, 0.3)
    assert found.blends[0].computed_tokens == 0
    assert_same(model, found.outputs, expected.outputs)


def test_chunks_that_are_computed_do_not_push_out_stored_chunks_of_the_same_prompt(model):
    chunks, query = random_chunks((20, 37, 30), 7)
    (other,), _ = random_chunks((20,), 1, seed=1)
    expected = run_share(model, store_of(model), chunks, query, 0.0)
    needed = blocks(21, 38, 31)
    store = store_of(model, needed * store_of(model).layout.block_bytes)
    run_share(model, store, [chunks[1]], query, 0.0)  # the least recently used
    run_share(model, store, [other, chunks[2]], query, 0.0)
    found = run_share(model, store, chunks, query, 0.0)
    assert [chunk.cached for chunk in found.blends[0].chunks] == [0, 37, 30]
    assert found.blends[0].rows == expected.blends[0].rows
    np.testing.assert_allclose(found.outputs, expected.outputs, **NEAR)
    assert_nothing_is_in_use(store)


def test_chunks_in_another_order_are_not_computed_again(model, store):
    chunks, query = random_chunks((20, 37, 9, 16), 7)
    run_share(model, store, chunks, query, 0.0)
    stored = len(store.memory)
    found = run_share(model, store, chunks[::-1], query, 1.0)
    assert found.blends[0].computed_tokens == 0
    assert len(store.memory) == stored
    np.testing.assert_allclose(
        found.outputs[0], own_full_pass(model, store, joined(chunks[::-1], query)[0]), **NEAR
    )


def test_a_chunk_that_stands_at_several_positions_is_computed_and_stored_once(model, tiny_llama, store):
    (one, other), query = random_chunks((32, 20), 7)
    chunks = [one, other, one, one]
    found = run_share(model, store, chunks, query, 0.0)
    assert found.blends[0].computed_tokens == 33 + 21
    assert len(store.memory) == blocks(33, 21)
    np.testing.assert_allclose(found.outputs[0], block_diagonal(tiny_llama, chunks, query), **NEAR)
    full = own_full_pass(model, store, joined(chunks, query)[0])
    np.testing.assert_allclose(run_share(model, store, chunks, query, 1.0).outputs[0], full, **NEAR)


def test_chunks_of_different_salts_are_apart(model, store):
    chunks, query = random_chunks((20, 37, 9), 7)
    results = [
        run_chunks(model, store, chunks, query, Recomputation(0.2), salt=salt)
        for salt in (b"one", b"two", b"one")
    ]
    one, two, again = (found.blends[0] for found in results)
    assert one.computed_tokens == two.computed_tokens > 0
    assert [chunk.cached for chunk in two.chunks] == [0, 0, 0]
    assert again.computed_tokens == 0
    assert all(np.array_equal(results[0].outputs, found.outputs) for found in results)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_blended_states_never_enter_the_store(model, store, ratio, whole):
    chunks, query = random_chunks((20, 37, 9), 7)
    ids, _ = joined(chunks, query)
    for _ in range(2):
        run_chunks(model, store, chunks, query, Recomputation(ratio), whole=whole)
        assert len(store.memory) == blocks(*(len(OPENING) + len(chunk) for chunk in chunks))
        assert store.lookup(key_values(store).whole(ids, b"")).memory == len(OPENING) + 20
    exact = run_exactly(model, store, ids)
    assert exact.cached_tokens.tolist() == [len(OPENING) + 20]
    assert_same(model, exact.outputs[0], own_full_pass(model, store, ids))


def test_a_longer_beginning_that_is_stored_exactly_is_used(model, store):
    chunks, query = random_chunks((20, 37, 30), 7)
    ids, _ = joined(chunks, query)
    run_share(model, store, chunks, query, 0.0)
    run_exactly(model, store, ids[:70])
    with noted_layers() as noted:
        found = run_chunks(model, store, chunks, query, Recomputation(0.0), whole=True)
    assert found.blends[0].exact_tokens == 69  # the last token's state was not kept
    assert [chunk.recomputed for chunk in found.blends[0].chunks] == [0, 0, 0]
    assert min(row for report in noted for row in report.rows) >= 69
    full = run_chunks(model, store, chunks, query, Recomputation(1.0), whole=True)
    assert full.blends[0].rows == (len(ids) - 69,) * LAYERS
    np.testing.assert_allclose(full.outputs[0], own_full_pass(model, store, ids), **NEAR)
    without = run_chunks(model, store, chunks, query, Recomputation(0.0))
    assert without.blends[0].exact_tokens == len(OPENING) + 20
    assert not without.blends[0].is_exact
    assert np.abs(found.outputs - without.outputs).max() > 1e-3


@pytest.mark.parametrize("kept", [0, 1])  # whether the last token is stored too
def test_where_the_whole_sequence_is_stored_exactly_only_the_last_token_is_computed(model, store, kept):
    chunks, query = random_chunks((20, 37, 30), 7)
    ids, spans = joined(chunks, query)
    stored = ids[: len(ids) - 1 + kept]
    run_exactly(model, store, [*stored, 5])
    blend = Blend.of(key_values(store), ids, spans, OPENING, b"", Recomputation(0.2))
    request = PrefillRequest(ids, False, prefix_key=key_values(store).whole(stored, b""), blend=blend)
    with torch.inference_mode():
        found = blended.run_blended(model, store, request)
    assert found.blends[0].exact_tokens == len(stored)
    assert found.blends[0].is_exact
    assert found.blends[0].rows == (1,) * LAYERS
    np.testing.assert_allclose(found.outputs[0], own_full_pass(model, store, ids), **NEAR)


@pytest.mark.parametrize("places", range(6))
def test_tokens_that_memory_has_no_room_for_are_computed_in_every_layer(model, places):
    chunks, query = random_chunks((20, 37, 9), 7)
    ids, spans = joined(chunks, query)
    store = store_of(model, memory=places * store_of(model).layout.block_bytes)
    for ratio in (0.0, 0.3, 1.0):
        cached, begin = [], store.begin

        def noting(*arguments, begin=begin, cached=cached):
            reservation = begin(*arguments)
            cached.append(reservation.given_tokens)
            return reservation

        with noted_layers() as noted, mock.patch.object(store, "begin", noting):
            found = run_share(model, store, chunks, query, ratio)
        missing = {*range(spans[-1][1], len(ids))}
        for (first, end), tokens, number in zip(spans, cached[-1], range(3), strict=True):
            kept = tokens if number == 0 else max(0, tokens - len(OPENING))
            missing |= {*range((0 if number == 0 else first) + kept, end)}
        assert len(missing) > len(query)
        assert all({*run.rows} >= missing for run in noted)
        if ratio == 0:
            assert all({*run.rows} == missing for run in noted)
        if ratio == 1 or not places:
            np.testing.assert_allclose(found.outputs[0], own_full_pass(model, store, ids), **NEAR)
        assert places or (found.blends[0].exact_tokens, missing) == (0, {*range(len(ids))})
        assert np.isfinite(found.outputs).all()
        assert_nothing_is_in_use(store)


def test_weights_that_are_not_numbers_make_the_answer_not_finite(tiny_llama, tmp_path):
    """Wherever the token stands that they belong to."""
    folder = damage_weights(shutil.copytree(tiny_llama, tmp_path / "broken"), 9)
    broken = load_model(read_checkpoint(folder), torch.float32)
    store = store_of(broken)
    chunks, query = [[5, 6, 7] * 10, [6, 8, 11] * 9], [5, 4]
    assert run_share(broken, store, chunks, query, 0.3).finite.tolist() == [True]
    stored = len(store.memory)
    for changed, end in ((chunks, [9, 4]), (chunks, [4, 9]), ([chunks[0], [8, 9, 5]], query)):
        for ratio in (0.0, 0.3, 1.0):
            assert run_share(broken, store, changed, end, ratio).finite.tolist() == [False]
            assert len(store.memory) == stored
    assert_nothing_is_in_use(store)


def test_two_requests_at_once_with_the_same_new_chunks_compute_them_once(model, store):
    chunks, query = random_chunks((20, 37, 9), 7)
    expected = run_share(model, store_of(model), chunks, query, 0.3)
    found = run_behind_another(model, *[partial(run_share, model, store, chunks, query, 0.3)] * 2)
    assert all(np.array_equal(result.outputs, expected.outputs) for result in found)
    computed = sum(result.blends[0].computed_tokens for result in found)
    assert computed == expected.blends[0].computed_tokens


def test_many_requests_at_once_in_little_memory_give_the_answers_of_full_passes(model):
    texts, query = random_chunks((20, 37, 9, 16, 5), 7)
    orders = [(0, 1, 2), (2, 1, 0), (3, 0, 4), (4, 4, 1), (1, 3, 2), (0, 2, 3)]
    sequences = [[texts[number] for number in order] for order in orders]
    store, found = store_of(model, memory=12 * store_of(model).layout.block_bytes), [None] * len(orders)

    def work(number):
        for _ in range(3):
            found[number] = run_share(model, store, sequences[number], query, 1.0).outputs[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(orders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for chunks, output in zip(sequences, found, strict=True):
        np.testing.assert_allclose(output, own_full_pass(model, store, joined(chunks, query)[0]), **NEAR)
    assert_nothing_is_in_use(store)


def test_a_pass_that_fails_lets_its_blocks_go(model, store):
    chunks, query = random_chunks((20, 37, 9), 7)
    with mock.patch.object(blended, "run_layers", side_effect=MemoryError), pytest.raises(MemoryError):
        run_share(model, store, chunks, query, 0.3)
    assert_nothing_is_in_use(store)
    assert run(model, store, [[*OPENING, *chunks[1]]]).report.tokens == 0  # the chunks were stored before
