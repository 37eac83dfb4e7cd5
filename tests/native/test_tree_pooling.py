"""Sequences of trees are pooled by the stack as NumPy pools the rows of the last layer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_stacks import ALL_LAYERS, FORMS, HIDDEN, PLACES, REUSED, made_stack

from attncache_core.heads.running import empty_states, pooled, running_states
from attncache_core.native.stack import KeyValueSlots, StackRows, TreePooling
from attncache_core.text.prefix_tree import continued_prefixes

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.fixture(scope="module")
def stacks(kernel):
    """Stacks by the modes that they pool in."""
    return {
        modes: made_stack(kernel.library, FORMS["decoder"], reused=(0,) * len(REUSED), modes=modes)
        for modes in (MODES, ("lasttoken",), ("mean",))
    }


def front_state(tokens):
    """A state after this number of tokens."""
    if not tokens:
        return empty_states(1, HIDDEN)[0]
    return np.random.default_rng(tokens).normal(size=(5, HIDDEN)).astype(np.float32)


# Texts over three tokens, so that many of them begin alike or are equal, and how many tokens are in front.
texts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=25), st.sampled_from([0, 0, 3, 9])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(texts=texts, skipped=st.sampled_from([0, 4, 11]), threads=st.integers(1, 3), data=st.data())
def test_vectors_and_kept_states_are_those_of_the_rows(stacks, texts, skipped, threads, data):
    stack = stacks[modes := data.draw(st.sampled_from(list(stacks)))]
    sequences, counts = [ids for ids, _ in texts], [count for _, count in texts]
    fronts = {count: front_state(count) for count in counts}
    found = continued_prefixes(sequences, counts, counts)
    tree, ids = found.tree, found.ids
    runs = np.repeat(np.arange(len(tree.parents)), np.diff(tree.offsets))
    positions = np.arange(len(ids)) + (tree.starts - tree.offsets[:-1])[runs]
    lengths = np.array([len(ids) + count for ids, count in texts])
    of_roots = tree.starts[tree.trees[:-1]].tolist()  # tokens in front of each tree
    # A block holds all that is given to a tree.
    size = max(1, *counts)
    block = np.zeros((len(REUSED), size, stack.slot_bytes), np.uint8)
    slots = KeyValueSlots(
        size,
        size * stack.slot_bytes,
        np.full(np.count_nonzero(of_roots), block.ctypes.data, np.uint64),
        np.cumsum([0, *(count > 0 for count in of_roots)]),
    )
    ends = np.empty(len(texts), np.int64)
    ends[found.order] = tree.ends
    addresses = [fronts[count].ctypes.data if count else 0 for count in counts]
    rows = np.array(sorted(data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=5))), np.int64)
    kept = np.full((len(rows), 5, HIDDEN), np.nan, np.float32)
    pooling = TreePooling(
        tree.parents,
        ends,
        lengths,
        np.array(addresses, np.uint64),
        rows,
        np.array([state.ctypes.data for state in kept], np.uint64),
    )
    stack_rows = StackRows(tree.offsets, positions, tree.trees, tree.starts, ids, ids % PLACES)
    hidden, _ = stack.run(None, stack_rows, ALL_LAYERS, threads=threads, slots=slots)
    skips = np.full(len(texts), skipped)
    rows_to_pool = replace(stack_rows, skipped=skips, pooling=pooling)
    found, finite, _ = stack.vectors(rows_to_pool, threads, slots=slots)

    assert finite.all()
    before = np.array([fronts[count] for count in of_roots])
    last = tree.offsets[1:][ends] - 1
    of_trees = np.full(len(of_roots), skipped)
    expected = running_states(hidden.numpy(), tree, before, of_trees, np.concatenate([last, rows]))
    np.testing.assert_allclose(kept, expected[len(texts) :], rtol=1e-5, atol=1e-5)
    vectors = pooled(expected[: len(texts)], lengths, skips, modes)
    np.testing.assert_allclose(found, vectors, rtol=1e-5, atol=1e-5)


def test_sequences_without_rows_are_pooled_from_their_states(stacks):
    states = np.random.default_rng(0).normal(size=(3, 5, HIDDEN)).astype(np.float32)
    lengths, skips = np.array([4, 5, 6]), np.array([0, 1, 9])
    states[1, 0, 0] = np.nan
    nothing, addresses = np.zeros(1, np.int64), np.array([state.ctypes.data for state in states], np.uint64)
    none = nothing[1:]
    pooling = TreePooling(none, np.full(3, -1), lengths, addresses, none, none)
    rows = StackRows(nothing, none, nothing, none, none, skipped=skips, pooling=pooling)
    vectors, finite, counts = stacks[MODES].vectors(rows, 2)
    assert finite.tolist() == [True, False, True]
    assert counts.multiplications == 0
    np.testing.assert_array_equal(vectors, pooled(states, lengths, skips, MODES))


@pytest.mark.parametrize("damaged", range(4))
def test_infinity_is_reported_for_the_sequences_that_contain_its_row(stacks, damaged):
    """Each of three sequences continues a token that all share; a row is one token."""
    stack = stacks["lasttoken",]
    parents, offsets = np.array([-1, 0, 0, 0]), np.arange(5)
    starts, ids = np.array([0, 1, 1, 1]), np.array([1, 2, 3, 4])
    pooling = TreePooling(
        parents, np.arange(1, 4), np.full(3, 2), np.zeros(3, np.uint64), *[np.zeros(0, np.int64)] * 2
    )
    rows = StackRows(offsets, starts, np.array([0, 4]), starts, ids, ids % PLACES, pooling=pooling)
    words = stack._layout.kept[1].words
    before = words[ids[damaged]].clone()
    words[ids[damaged]] = np.inf
    try:
        _, finite, _ = stack.vectors(rows, 1)
    finally:
        words[ids[damaged]] = before
    assert finite.tolist() == [damaged not in (0, sequence) for sequence in range(1, 4)]
