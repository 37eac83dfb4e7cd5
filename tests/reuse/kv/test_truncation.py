"""Truncated keys and values: exact in the first layer, approximate behind it, and never found as a text's."""

import numpy as np
import pytest
from kv_models import assert_nothing_is_in_use, pooled_by, prefix_key, random_ids, run, store_of

from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.engine.continued import run_continued
from attncache_core.engine.request import PrefillRequest
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse


@pytest.fixture(scope="module")
def model(model):
    return pooled_by(model, "lasttoken")


def slots_of(store, sequence):
    """The slots of all tokens of a stored sequence, uint8 [layers, tokens, slot_bytes]."""
    known = store.memory.known(sequence)
    parts = [store.memory.pool.slots(block.place)[:, : block.name.length] for block in known.blocks]
    return np.concatenate(parts, axis=1)


def reuse_of(store):
    return KeyValueReuse(store, b"model", Pooling(("lasttoken",)), prompt_tokens=0)


def truncate(store, ids, positions):
    return reuse_of(store).truncate(ids, None, b"", positions)


@pytest.mark.parametrize(
    "positions", [list(range(40, 100)), [0, 1, 2, 3, *range(50, 100)], [3, 17, 99], list(range(100))]
)
def test_slots_are_those_of_the_kept_tokens_and_exact_in_the_first_layer(model, positions):
    if model.stack is None:
        pytest.skip("the last bits of torch's products depend on the number of rows")
    store, ids = store_of(model), random_ids(100)
    run(model, store, [ids])
    kept = [ids[position] for position in positions]
    salt = truncate(store, ids, positions)
    found = slots_of(store, prefix_key(kept, salt))
    assert np.array_equal(found, slots_of(store, prefix_key(ids))[:, positions])
    other = store_of(model)
    run(model, other, [kept])
    recomputed = slots_of(other, prefix_key(kept))
    assert np.array_equal(found[0], recomputed[0])
    whole = positions == list(range(100))
    assert np.array_equal(found[1:], recomputed[1:]) == whole
    assert_nothing_is_in_use(store)


def test_new_tokens_continue_the_kept_ones_and_only_they_are_computed(model):
    store, ids, new = store_of(model), random_ids(100), random_ids(7, 1)
    run(model, store, [ids])
    positions = list(range(50, 100))
    kept = [ids[position] for position in positions]
    salt = truncate(store, ids, positions)
    truncated = run(model, store, [kept + new], salts=[salt])
    assert (truncated.report.tokens, truncated.cached_tokens.tolist()) == (7, [50])
    exact = run(model, store, [kept + new])
    assert exact.report.tokens == 57  # what was truncated does not stand for these tokens
    assert not np.array_equal(truncated.outputs, exact.outputs)
    assert truncated.finite.all()


def test_a_vector_of_truncated_tokens_alone_is_unknown_and_not_answered(model):
    store, ids = store_of(model), random_ids(40)
    run(model, store, [ids])
    salt = truncate(store, ids, list(range(8, 40)))
    assert not run(model, store, [ids[8:]], salts=[salt]).finite.any()


def test_conversation_that_is_what_was_kept_is_answered_and_can_be_cut_again(model):
    store, ids = store_of(model), random_ids(40)
    run(model, store, [ids])
    reuse, kept = reuse_of(store), ids[8:]
    salt = reuse.truncate(ids, None, b"", list(range(8, 40)))
    again = reuse.truncate(kept, None, salt, list(range(len(kept))))
    for named in (salt, again):
        request = PrefillRequest(kept, False, None, reuse.prefix_key(kept, None, named))
        found = run_continued(model, store, [request], [0])
        assert found.finite.all()
        assert found.cached_tokens.tolist() == [16]  # the block of the last token is computed again
    assert_nothing_is_in_use(store)


def test_tokens_that_are_not_stored_cannot_be_kept(model):
    store, ids = store_of(model), random_ids(40)
    assert truncate(store, ids, [1, 2]) is None
    run(model, store, [ids[:32]])
    assert truncate(store, ids, [1, 31]) is not None
    assert truncate(store, ids, [1, 32]) is None
    assert_nothing_is_in_use(store)
