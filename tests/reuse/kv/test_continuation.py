"""Batches behind stored keys and values: results, what is computed, and what is stored."""

from functools import partial
from itertools import takewhile
from unittest import mock

import numpy as np
import pytest
import torch
from core_decoders import write_llama
from core_models import damage_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_models import (
    Remembered,
    assert_nothing_is_in_use,
    assert_same,
    computed_by,
    plain,
    pooled_by,
    prefix_key,
    random_ids,
    run,
    run_behind_another,
    store_of,
)

from attncache_core import native
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.continued import run_continued
from attncache_core.engine.request import PrefillRequest
from attncache_core.models import load_model
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS, root_key
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.opening import block_layout, values_fingerprint
from attncache_core.text import prefix_tree


# Prompts that branch off each other at any token.
@st.composite
def trees_of_prompts(draw):
    prompts = [random_ids(draw(st.integers(1, 50)), 0)]
    for seed in range(1, draw(st.integers(2, 7))):
        parent = draw(st.sampled_from(prompts))
        kept = parent[: draw(st.integers(0, len(parent)))]
        prompts.append(kept + random_ids(draw(st.integers(0 if kept else 1, 40)), seed))
    return prompts


batches = trees_of_prompts().flatmap(
    lambda prompts: st.lists(
        st.lists(
            st.tuples(st.sampled_from(prompts), st.sampled_from([b"", b"other", None])),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=4,
    )
)


@given(trees_of_prompts(), st.lists(st.sampled_from([b"", b"other"]), min_size=8, max_size=8))
def test_names_of_blocks_do_not_depend_on_the_sequence_named_before(prompts, salts):
    last = None
    for ids, salt in zip(prompts, salts, strict=False):
        key = PrefixKey.of(root_key(b"model", salt), ids, len(ids), last)
        assert key == PrefixKey.of(root_key(b"model", salt), ids, len(ids))
        if last and key.root == last.root:
            pairs = zip(key.tokens, last.tokens, strict=False)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // (4 * BLOCK_TOKENS)
            assert all(one is other for one, other in zip(key.names[:alike], last.names, strict=False))
        last = key


MODES = ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]


@pytest.fixture(scope="module")
def models(model):
    """The model by the modes that it pools in."""
    return {modes: pooled_by(model, *modes) for modes in (*((mode,) for mode in MODES), ("max", "mean"))}


@settings(max_examples=50, deadline=None)
@given(batches=batches, data=st.data(), skipped=st.sampled_from([0, 5]))
def test_results_and_computed_tokens_are_those_of_the_tree(models, batches, data, skipped):
    model = models[data.draw(st.sampled_from(list(models)))]
    store, remembered = store_of(model), Remembered()
    for batch in batches:
        sequences, salts = [ids for ids, _ in batch], [salt for _, salt in batch]
        # Every common prefix is shared, even if this saves little.
        with mock.patch.object(prefix_tree, "_MIN_SAVING", 10**9):
            result = run(model, store, sequences, salts=salts, skipped=skipped)
            expected = plain(model, sequences, skipped=skipped)
        assert_same(model, result.outputs, expected.outputs)
        cached = [0 if salt is None else remembered.given(ids, salt) for ids, salt in batch]
        assert result.cached_tokens.tolist() == cached
        assert result.report.tokens == remembered.computed(sequences, salts)
        for ids, salt in batch:
            if salt is not None:
                remembered.add(ids, salt)
    assert len(store.memory) == len(remembered.prefixes)
    assert_nothing_is_in_use(store)


def test_a_sequence_that_is_known_whole_runs_no_layer(model):
    store, sequences = store_of(model), [random_ids(40), random_ids(7, 1)]
    first = run(model, store, sequences)
    again = run(model, store, sequences)
    assert (again.report.tokens, again.report.attention_seconds) == (0, 0.0)
    assert_same(model, again.outputs, first.outputs)


def test_the_longest_of_several_ends_that_are_stored_is_given(model):
    store, ids = store_of(model), random_ids(28)
    found = [run(model, store, [ids[:length]]).report.tokens for length in (21, 25, 28)]
    assert found == [21, 4, 3]


def test_what_pooling_leaves_out_is_part_of_the_key(model):
    store, ids = store_of(model), random_ids(40)
    run(model, store, [ids], skipped=3)
    found = run(model, store, [ids], skipped=8)
    assert found.report.tokens == 40
    assert_same(model, found.outputs, plain(model, [ids], skipped=8).outputs)


def test_tokens_are_compared_not_only_keys(model):
    store, ids = store_of(model), random_ids(BLOCK_TOKENS)
    run(model, store, [ids])
    other = prefix_key(random_ids(BLOCK_TOKENS, 1))
    key = prefix_key(ids).names[0].key
    forged = other._replace(names=[other.names[0]._replace(key=key)])  # as if the hash collided
    assert store.lookup(prefix_key(ids)).memory == BLOCK_TOKENS
    assert store.lookup(forged).memory == 0


@pytest.fixture(params=["compiled", "by layers"])
def damaged(request, tmp_path):
    """A model in which the embedding of token 400 is NaN."""
    model = load_model(read_checkpoint(damage_weights(write_llama(tmp_path), 400)), torch.float32)
    if request.param == "by layers":
        model.__dict__["stack"] = None
    elif model.stack is None:
        pytest.skip("there is no compiled stack")
    return model


@pytest.mark.parametrize("where", [0, 20, 39])
def test_only_the_sequence_of_a_damaged_token_is_not_finite_and_not_stored(damaged, where):
    store, front = store_of(damaged), random_ids(20)
    sequences = [front + random_ids(20, seed) for seed in range(1, 4)]
    sequences[1][where] = 400
    for more in ([], random_ids(9, 9)):
        sequences = [ids + more for ids in sequences]
        found = run(damaged, store, sequences)
        assert found.finite.tolist() == [True, False, True]
        assert np.isfinite(found.outputs[[0, 2]]).all()
        stored = [store.lookup(prefix_key(ids)).memory for ids in sequences]
        assert stored[::2] == [len(ids) for ids in sequences[::2]]
        assert stored[1] <= where
        assert_nothing_is_in_use(store)


@pytest.mark.parametrize("step", ["packing", "computing"])
def test_a_batch_that_fails_frees_what_it_reserved(model, step):
    store, ids = store_of(model), random_ids(40)
    failing = {
        "packing": "attncache_core.reuse.kv.continuation.continued_prefixes",
        "computing": f"attncache_core.engine.continued.{computed_by(model)}",
    }
    with mock.patch(failing[step], side_effect=MemoryError), pytest.raises(MemoryError):
        run(model, store, [ids])
    assert store.memory.pool.used == 0
    assert_nothing_is_in_use(store)
    assert run(model, store, [ids]).report.tokens == 40


@pytest.mark.parametrize("places", [0, 1, 3])
def test_little_memory_changes_no_result(model, places):
    store = store_of(model, memory=places * store_of(model).layout.block_bytes)
    for seed in (0, 1, 0, 2, 1):
        sequences = [random_ids(60, seed), random_ids(60, seed)[:30] + random_ids(9, seed + 9)]
        found = run(model, store, sequences)
        assert_same(model, found.outputs, plain(model, sequences).outputs)
        assert store.memory.pool.used <= places
        assert_nothing_is_in_use(store)
    assert store.counts.not_kept_blocks


@settings(max_examples=50, deadline=None)
@given(batches, st.integers(1, 12))
def test_the_end_of_a_sequence_leaves_before_its_front(model, batches, places):
    """A block can be found only behind all those before it."""
    store = store_of(model, memory=places * store_of(model).layout.block_bytes)
    for batch in batches:
        run(model, store, [ids for ids, _ in batch], salts=[salt for _, salt in batch])
        roots = {root_key(b"model", salt) for salt in (b"", b"other")}
        blocks = store.memory._blocks
        assert all(block.name.parent in {*roots, *blocks} for block in blocks.values())


def test_pinned_blocks_stay(model):
    store = store_of(model, memory=4 * store_of(model).layout.block_bytes)
    ids = random_ids(32)
    run(model, store, [ids])
    assert store.pin(prefix_key(ids)) == 32
    for seed in range(1, 5):
        run(model, store, [random_ids(60, seed)])
    assert store.lookup(prefix_key(ids)).memory == 32
    store.pin(prefix_key(ids), pinned=False)
    for seed in range(1, 5):
        run(model, store, [random_ids(60, seed)])
    assert store.lookup(prefix_key(ids)).memory == 0


def test_clearing_frees_all_places_even_of_blocks_in_use(model):
    store, ids = store_of(model), random_ids(40)
    run(model, store, [ids])
    reservation = store.begin([prefix_key(ids)])
    assert store.clear() == 3
    assert store.memory.pool.used == 3
    assert not store.memory._short  # or the lengths of ends of sequences would pile up
    store.finish(reservation)
    assert store.memory.pool.used == 0
    assert run(model, store, [ids]).report.tokens == 40


def test_two_batches_with_the_same_new_prefix_compute_it_once(model):
    store, prefix = store_of(model), random_ids(48)
    sequences = [prefix + random_ids(5, 1), prefix + random_ids(9, 2)]
    first, second = run_behind_another(model, *(partial(run, model, store, [ids]) for ids in sequences))
    assert first.report.tokens == len(sequences[0])
    assert second.report.tokens == 9
    assert_same(model, second.outputs, plain(model, sequences[1:]).outputs)


def test_a_batch_does_not_wait_for_ever(model, monkeypatch):
    monkeypatch.setattr("attncache_core.reuse.kv.store._MAX_WAITING_SECONDS", 0.01)
    store, ids = store_of(model), random_ids(40)
    stuck = store.begin([prefix_key(ids)])
    assert run(model, store, [ids]).report.tokens == 40
    store.abandon(stuck)
    assert_nothing_is_in_use(store)


def test_groups_share_nothing_in_a_batch(model):
    store, ids = store_of(model), random_ids(40)
    requests = [PrefillRequest(ids, False, group=group) for group in ("one", "one", "two")]
    assert run_continued(model, store, requests, [0] * 3).report.tokens == 80


def test_a_sequence_without_tokens_is_refused(model):
    with pytest.raises(ValueError, match="at least one token"):
        run(model, store_of(model), [[]], salts=[None])


def test_what_runs_while_the_store_is_cleared_is_not_stored(model):
    store, ids = store_of(model), random_ids(40)
    reservation = store.begin([prefix_key(ids)])
    store.clear()
    store.finish(reservation)
    assert store.lookup(prefix_key(ids)).memory == 0
    assert_nothing_is_in_use(store)


def test_what_other_code_has_computed_has_another_fingerprint(model, monkeypatch):
    layout, found, compiled = block_layout(model), set(), model.stack
    for level in ("avx512", "avx2", None):
        monkeypatch.setattr(native, "level", lambda level=level: level)
        for stack in (compiled, None):
            monkeypatch.setattr(model, "stack", stack)
            found.add(values_fingerprint(model, "a" * 64, layout, "model"))
    assert len(found) == (6 if compiled else 3)
