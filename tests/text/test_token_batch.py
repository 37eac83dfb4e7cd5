"""Packing keeps every sequence intact, and the caller's order can be restored."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from core_models import random_sequences
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.text.token_batch import Group, pack

lengths_of_batches = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def sequences_in(batch):
    """Split the packed tokens into sequences, using only the lengths."""
    return [part.tolist() for part in torch.split(batch.ids, batch.lengths.tolist())]


@given(lengths_of_batches)
def test_offsets_cut_the_packed_tokens_into_the_sequences(lengths):
    """Whose positions count from zero, and which the caller's order gives back."""
    sequences = random_sequences(lengths)
    batch = pack(sequences)
    ids = batch.ids.tolist()
    cut = [ids[first:end] for first, end in pairwise(batch.offsets.tolist())]
    assert cut == sequences_in(batch)
    assert batch.offsets.dtype == np.int64
    assert [cut[index] for index in np.argsort(batch.order)] == sequences
    assert batch.in_callers_order(batch.lengths).tolist() == lengths
    assert batch.positions.tolist() == [position for length in batch.lengths for position in range(length)]


@given(lengths_of_batches)
def test_groups_are_one_for_each_length_and_cover_the_batch_in_order(lengths):
    batch = pack(random_sequences(lengths))
    groups = batch.groups()
    assert [group.length for group in groups] == sorted(set(lengths))
    assert [group.count for group in groups] == [lengths.count(group.length) for group in groups]
    tokens = [token for group in groups for token in range(len(batch.ids))[group.tokens]]
    assert tokens == list(range(len(batch.ids)))
    covered = [index for group in groups for index in range(len(lengths))[group.sequences]]
    assert covered == list(range(len(lengths)))


@given(lengths_of_batches, st.data())
def test_groups_of_a_range_cover_exactly_that_range(lengths, data):
    batch = pack(random_sequences(lengths))
    first = data.draw(st.integers(0, len(lengths)))
    end = data.draw(st.integers(first, len(lengths)))
    groups = batch.groups(first, end)
    packed = sequences_in(batch)
    held = [
        row for group in groups for row in batch.ids[group.tokens].view(group.count, group.length).tolist()
    ]
    assert held == packed[first:end]
    assert sum(group.count for group in groups) == end - first


@given(lengths_of_batches, st.data())
def test_reordering_moves_sequences_activations_and_the_callers_order_alike(lengths, data):
    sequences = random_sequences(lengths)
    batch = pack(sequences)
    permutation = np.array(data.draw(st.permutations(range(len(lengths)))))
    moved, index = batch.reordered(permutation)
    packed = sequences_in(batch)
    assert sequences_in(moved) == [packed[index] for index in permutation]
    assert batch.ids[index].tolist() == moved.ids.tolist()
    assert batch.positions[index].tolist() == moved.positions.tolist()
    assert [sequences[index] for index in moved.order] == sequences_in(moved)


def test_sequences_of_equal_length_keep_their_order():
    batch = pack([[7, 7], [5], [6, 6], [4]])
    assert batch.ids.tolist() == [5, 4, 7, 7, 6, 6]
    assert batch.order.tolist() == [1, 3, 0, 2]


def test_runs_of_one_length_that_do_not_touch_are_two_groups():
    batch, _ = pack([[5], [6], [7, 7]]).reordered(np.array([0, 2, 1]))
    assert batch.groups() == [Group(0, 1, 0, 1), Group(1, 1, 1, 2), Group(2, 1, 3, 1)]


@pytest.mark.parametrize("sequences", [[], [[]], [[2, 3], []]], ids=["nothing", "empty", "one-empty"])
def test_a_batch_without_tokens_is_refused(sequences):
    with pytest.raises(ValueError, match="at least one"):
        pack(sequences)
