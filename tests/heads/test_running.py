"""Pooling that continues: wherever a sequence is divided, the pooled vectors are those of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.heads.pooling import Pooler
from attncache_core.heads.running import empty_states, pooled, running_states
from attncache_core.text.prefix_tree import continued_prefixes
from attncache_core.text.token_batch import pack

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
WIDTH = 7


def rows_of(ids):
    """The hidden state of each token: a function of all tokens before it, as in a causal model."""
    return np.stack([np.random.default_rng(ids[: end + 1]).normal(size=WIDTH) for end in range(len(ids))])


def states_behind(sequences, cached, before, skipped, ends):
    """Return the states of the sequences after their first `ends` tokens, computed behind `cached` tokens."""
    rest = [ids[count:] for ids, count in zip(sequences, cached, strict=True)]
    groups = list(range(len(sequences)))
    found = continued_prefixes(rest, groups, cached)
    hidden = np.concatenate(
        [rows_of(sequences[index])[cached[index] :] for index in found.order.tolist()]
    ).astype(np.float32)
    order = found.order.argsort()
    rows = found.tree.rows(order, np.array(ends) - 1)
    return running_states(hidden, found.tree, before[found.order], np.array(skipped)[found.order], rows)


cases = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(cases=cases, skipped=st.integers(0, 12), mode=st.sampled_from(MODES))
def test_divided_sequences_are_pooled_as_whole_ones(cases, skipped, mode):
    sequences = [ids for ids, _, _ in cases]
    lengths = [len(ids) for ids in sequences]
    counts = [skipped] * len(sequences)
    cached = [int(share * (length - 1)) for (_, share, _), length in zip(cases, lengths, strict=True)]
    nothing = [0] * len(sequences)
    start = empty_states(len(sequences), WIDTH)
    ends = [max(1, count) for count in cached]
    middle = states_behind(sequences, nothing, start, counts, ends)
    middle[np.array(cached) == 0] = start[0]
    found = states_behind(sequences, cached, middle, counts, lengths)
    whole = states_behind(sequences, nothing, start, counts, lengths)
    assert np.array_equal(found, whole)

    batch = pack(sequences)
    hidden = torch.from_numpy(np.concatenate([rows_of(sequences[index]) for index in batch.order.tolist()]))
    # Without the prompt, weights of "weightedmean" and the other modes begin behind it.
    expected = Pooler((mode,), skipped)(hidden.float(), batch)
    vectors = pooled(found, np.array(lengths), np.array(counts), (mode,))
    assert np.allclose(vectors, batch.in_callers_order(expected.numpy()), rtol=1e-5, atol=1e-6)


def test_modes_are_concatenated_in_order():
    states = np.random.default_rng(0).normal(size=(3, 5, WIDTH)).astype(np.float32)
    lengths, skipped = np.array([4, 5, 6]), np.array([0, 1, 9])
    both = pooled(states, lengths, skipped, ("mean", "max"))
    assert np.array_equal(both[:, :WIDTH], pooled(states, lengths, skipped, ("mean",)))
    assert np.array_equal(both[:, WIDTH:], pooled(states, lengths, skipped, ("max",)))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown pooling mode median"):
        pooled(empty_states(1, WIDTH), np.array([1]), np.array([0]), ("median",))
