"""Near-duplicates are found as a comparison of all pairs of sequences finds them."""

from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from attncache_core.corpus import near_duplicates as module
from attncache_core.corpus.near_duplicates import near_duplicates

SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=8)


def common(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def similarity(a, b):
    one, other = ({*pairwise(ids)} or {(*ids, *ids)} for ids in (a, b))
    return len(one & other) / len(one | other)


@given(SEQUENCES, SEQUENCES)
@example([[1, 3]], [[2, 1, 3], [0, 3]])
def test_they_are_those_of_all_pairs(sequences, of):
    every = [*sequences, *of] or [[]]
    first = common(min(every), max(every))
    rest = [ids[::-1] for ids in (each[first:] for each in every)]
    last = common(min(rest), max(rest))
    middles, others = (
        [ids[max(first - 1, 0) : len(ids) - max(last - 1, 0)] for ids in texts] for texts in (sequences, of)
    )
    expected = [any(similarity(ids, other) >= 0.5 for other in others) for ids in middles]
    assert near_duplicates(sequences, of).tolist() == expected


def test_parts_of_many_sequences_are_put_together(monkeypatch):
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 3)
    sequences = [[number, number + 1, number + 2] for number in range(10)]
    found = near_duplicates(sequences, [sequences[4], sequences[8]])
    assert np.flatnonzero(found).tolist() == [4, 8]


def test_one_word_of_six_may_differ():
    text, other = [1, 10, 11, 12, 13, 14, 15, 2], [1, 30, 2]
    assert near_duplicates([[1, 10, 11, 99, 13, 14, 15, 2]], [text, other]).tolist() == [True]
    assert near_duplicates([[1, 10, 98, 99, 97, 14, 15, 2]], [text, other]).tolist() == [False]


def test_template_makes_no_texts_alike():
    template, end = list(range(100, 140)), [200, 201]
    texts = [[1, *template, text, text + 20, text + 40, *end, 2] for text in range(10, 20)]
    assert not near_duplicates(texts[:5], texts[5:]).any()
    assert near_duplicates(texts, texts[5:]).tolist() == [False] * 5 + [True] * 5
