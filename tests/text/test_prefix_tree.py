"""A tree packs every distinct prefix once, and every token sees exactly the tokens before it."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from attncache_core.runtime.devices import CPU
from attncache_core.text import prefix_tree
from attncache_core.text.prefix_tree import added_tokens, continued_prefixes
from attncache_core.text.token_batch import pack_shared

# Few token ids, so that most sequences begin like others, equal others or begin others.
tries = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8)
NESTED = [[1] * length for length in (3, 1, 6, 3, 2)]


def shared_wherever_possible(sequences):
    """Pack sequences, sharing every common prefix."""
    with mock.patch.object(prefix_tree, "_MIN_SAVING", 10**9):
        return pack_shared(sequences)


def prefixes_of(sequences):
    return {tuple(ids[: end + 1]) for ids in sequences for end in range(len(ids))}


def seen(tree, blocks, reach):
    """Return how often each row is read for each row, by the runs that are alone and by blocks."""
    found = np.zeros((tree.offsets[-1], tree.offsets[-1]), dtype=int)
    for offsets in tree.alone:
        for first, end in pairwise(offsets.tolist()):
            causal = np.tril(np.ones((end - first, end - first), dtype=int))
            distance = np.subtract.outer(np.arange(end - first), np.arange(end - first))
            found[first:end, first:end] += causal * (distance <= reach)
    for block in blocks:
        columns = [*block.before.tolist(), *range(block.rows.start, block.rows.stop)]
        found[block.rows, columns] += block.visible.numpy()
    return found


def rows_of(batch, sequences):
    """Return the rows of each sequence's tokens."""
    return [batch.rows(np.full(len(ids), index), np.arange(len(ids))) for index, ids in enumerate(sequences)]


@given(tries)
@example(NESTED)
def test_every_distinct_prefix_has_one_row_and_every_sequence_is_found_with_its_positions(sequences):
    batch = shared_wherever_possible(sequences)
    assert len(batch.ids) == batch.offsets[-1] == len(prefixes_of(sequences))
    rows = rows_of(batch, sequences)
    assert [batch.ids[row].tolist() for row in rows] == sequences
    assert [batch.positions[row].tolist() for row in rows] == [list(range(len(ids))) for ids in sequences]
    assert batch.in_callers_order(batch.last_rows).tolist() == [row[-1] for row in rows]
    apart, ids = batch.apart(batch.ids)
    assert apart.tree is None
    assert torch.equal(apart.ids, ids)
    packed = [part.tolist() for part in torch.split(ids, apart.lengths.tolist())]
    assert packed == [sequences[index] for index in apart.order]


@given(tries)
@example(NESTED)
def test_parents_come_first_and_descendants_follow_and_a_condition_on_runs_holds_on_whole_paths(sequences):
    batch = shared_wherever_possible(sequences)
    if batch.tree is None:
        return
    parents, ends = batch.tree.parents.tolist(), batch.tree.descendants_end.tolist()
    below = [{run} for run in range(len(parents))]
    for run in reversed(range(len(parents))):
        assert parents[run] < run
        if parents[run] >= 0:
            below[parents[run]] |= below[run]
    assert below == [set(range(run, end)) for run, end in enumerate(ends)]
    runs = np.logical_and.reduceat(batch.ids.numpy() != 0, batch.offsets[:-1])
    found = batch.in_callers_order(batch.tree.of_sequences(runs))
    assert found.tolist() == [0 not in ids for ids in sequences]


@given(tries, st.sampled_from([None, 0, 2]), st.sampled_from([1, 3, 256]))
@example(NESTED, None, 3)
def test_a_row_sees_the_rows_of_the_tokens_before_it_and_no_other(sequences, before, max_rows):
    batch = shared_wherever_possible(sequences)
    if batch.tree is None:
        return
    positions = batch.positions.numpy()
    reach = len(positions) if before is None else before
    expected = np.zeros((len(positions), len(positions)), dtype=int)
    for rows in rows_of(batch, sequences):
        expected[np.ix_(rows, rows)] = np.tril(np.ones((len(rows), len(rows)), dtype=int))
    expected *= positions[:, None] - positions <= reach
    with mock.patch.object(prefix_tree, "_BLOCK_ROWS", max_rows):
        for make in (batch.tree.blocks, batch.tree.single_rows):
            np.testing.assert_array_equal(seen(batch.tree, make(before, CPU), reach), expected)


@given(tries, st.integers(1, 9), st.sampled_from([1, 3, 256]))
@example(NESTED, 4, 3)
def test_a_row_sees_the_given_tokens_of_its_tree_which_see_nothing_if_they_are_many(
    sequences, count, max_rows
):
    found = continued_prefixes(sequences, ["one"] * len(sequences), [count] * len(sequences))
    tree, rows = found.tree.with_given_tokens()
    inner = seen(found.tree, found.tree.blocks(None, CPU), len(found.ids))
    with mock.patch.object(prefix_tree, "_BLOCK_ROWS", max_rows):
        whole = seen(tree, tree.blocks(None, CPU), int(tree.offsets[-1]))
    np.testing.assert_array_equal(whole[np.ix_(rows, rows)], inner)
    of_given = np.delete(whole, rows, axis=1)
    assert (of_given[rows].sum(axis=1) == count).all()
    for first, end in pairwise([*tree.offsets[tree.trees[:-1]].tolist(), int(tree.offsets[-1])]):
        assert whole[first : first + count].any() == (end - first <= max_rows)


def test_trees_are_apart_if_a_common_beginning_saves_little():
    first, second = ([[0, token, *range(2, 40), end] for end in (50, 51, 52)] for token in (1, 2))
    batch = pack_shared([*first, *second])
    assert (batch.tree.parents < 0).sum() == 2
    assert len(batch.ids) == 2 * (40 + 3)


def test_sequences_that_share_next_to_nothing_are_packed_without_a_tree():
    assert pack_shared([[0, token, *range(2, 40)] for token in (41, 42, 43)]).tree is None


def test_sequences_behind_many_given_tokens_share_a_beginning_that_alone_would_save_little():
    rest = [[0, token, *range(2, 40)] for token in (41, 42, 43)]
    assert len(continued_prefixes(rest, ["one"] * 3, [320] * 3).ids) == 1 + 3 * 39
    assert len(continued_prefixes(rest, ["one"] * 3, [2] * 3).ids) == 3 * 40


def test_prompt_tokens_follow_their_sequences():
    batch = pack_shared([[1, 2, 4], [1, 2, 3], [1, 2]], prompt_tokens=[10, 20, 30])
    assert batch.tree is not None
    assert batch.in_callers_order(batch.prompt_tokens).tolist() == [10, 20, 30]


@given(tries)
def test_added_tokens_are_those_that_the_sequence_before_does_not_begin_with(sequences):
    expected, known = [], set()
    for ids in sequences:
        prefixes = prefixes_of([ids])
        expected.append(len(prefixes - known))
        known = prefixes
    assert added_tokens(sequences) == expected


@pytest.mark.parametrize("sequences", [[], [[]], [[2, 3], []]], ids=["nothing", "empty", "one-empty"])
def test_a_batch_without_tokens_is_refused(sequences):
    with pytest.raises(ValueError, match="at least one"):
        pack_shared(sequences)
