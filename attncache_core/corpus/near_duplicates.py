"""Find token sequences that are nearly equal to others, so that held-out texts resemble no trained text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile

import numpy as np
from scipy import sparse

# Two texts are near-duplicates if they share at least this share of their pairs of neighbouring tokens. One
# word of six may differ.
_SHARED = 0.5
_ROWS_AT_ONCE = 1000


def near_duplicates(sequences: Sequence[Sequence[int]], of: Sequence[Sequence[int]]) -> np.ndarray:
    """Return which sequences are equal or nearly equal to a sequence of `of`, bool [sequences].

    Nearly equal means that the sets of pairs of neighbouring tokens have a Jaccard similarity of at least
    one half. Tokens that all sequences begin or end with, like a template, are left out but for one.
    """
    columns: dict[tuple[int, ...], int] = {}
    middle = _without_common_ends([*sequences, *of])
    others, pairs = _pairs(of, middle, columns), _pairs(sequences, middle, columns)
    others.resize(len(of), len(columns))
    sizes, other_sizes = (np.asarray(matrix.sum(axis=1)).ravel() for matrix in (pairs, others))
    found = np.zeros(len(sequences), dtype=bool)
    for first in range(0, len(sequences), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        shared = (pairs[rows] @ others.T).tocoo()
        united = sizes[rows][shared.row] + other_sizes[shared.col] - shared.data
        found[first + shared.row[shared.data >= _SHARED * united]] = True
    return found


def _without_common_ends(sequences: Sequence[Sequence[int]]) -> slice:
    """Return the slice without what all sequences begin with, and what all of them end with, but one token.

    The token stands for the begin or the end of a text, as [CLS] and [SEP] do without a template.
    """
    first = _common(zip(*sequences, strict=False))
    last = _common(zip(*(ids[first:][::-1] for ids in sequences), strict=False))
    return slice(max(first - 1, 0), -last + 1 if last > 1 else None)


def _common(columns: Iterable[tuple[int, ...]]) -> int:
    """Return how many of the first columns hold one number only."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _pairs(
    sequences: Sequence[Sequence[int]], middle: slice, columns: dict[tuple[int, ...], int]
) -> sparse.csr_matrix:
    """Return the distinct pairs of neighbouring tokens of each sequence, int64 [sequences, pairs], 1 or 0.

    middle: the part of each sequence that counts. columns: pair -> its column; new pairs are added. The token
    of a part of one token is paired with itself.
    """
    indices, ends = [], [0]
    for whole in sequences:
        ids = whole[middle]
        pairs = set[tuple[int, ...]](pairwise(ids)) or {(*ids, *ids)}
        indices += [columns.setdefault(pair, len(columns)) for pair in pairs]
        ends.append(len(indices))
    ones = np.ones(len(indices), dtype=np.int64)
    return sparse.csr_matrix((ones, indices, ends), shape=(len(sequences), len(columns)))
