"""Pooling that continues: the state of every pooling after some tokens of a sequence.

    state after n tokens, last normed hidden states of more tokens -> state after more tokens -> pooled vector

A sequence whose first tokens are not computed again has no hidden states of these tokens. The state stands
for them. Sums are added token by token, so the state does not depend on where a sequence was divided: pooled
vectors are the same to the last bit whether all tokens were computed or only the last one.

This module pools for the plain executor and for blended sequences. The compiled stack pools by itself
(native/states.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from attncache_core.text.prefix_tree import PrefixTree

# The rows of a state, each [width].
SUM, WEIGHTED_SUM, MAXIMUM, FIRST, LAST = range(5)


def empty_states(count: int, width: int) -> np.ndarray:
    """Return the states of sequences without tokens, float32 [count, 5, width]."""
    states = np.zeros((count, 5, width), dtype=np.float32)
    states[:, MAXIMUM] = -np.inf
    return states


def running_states(
    hidden: np.ndarray, tree: PrefixTree, before: np.ndarray, skipped: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Return the states after some rows of a tree, float32 [n, 5, width].

    hidden: the model's last normed hidden states, float32 [all rows, width]. before: the states in front of
    each tree, float32 [trees, 5, width]. skipped: for each tree, the first position that pooling includes;
    LAST includes all positions. rows: int64 [n].
    """
    ends: list[np.ndarray] = []  # the state after each run
    roots, of_runs = iter(before), np.repeat(skipped, np.diff(tree.trees)).tolist()
    found = np.empty((len(rows), 5, hidden.shape[1]), dtype=np.float32)
    for run, (first, end) in enumerate(pairwise(tree.offsets.tolist())):
        parent = int(tree.parents[run])
        begin = ends[parent] if parent >= 0 else next(roots)
        states = _states_of_run(hidden[first:end], begin, int(tree.starts[run]), of_runs[run])
        ends.append(states[-1])
        inside = np.flatnonzero((rows >= first) & (rows < end))
        found[inside] = states[rows[inside] - first]
    return found


def _states_of_run(hidden: np.ndarray, begin: np.ndarray, start: int, skipped: int) -> np.ndarray:
    """Return the state after each row of a run, [rows, 5, width]. start: position of the first row."""
    positions = np.arange(start, start + len(hidden), dtype=np.float32)[:, None]
    counts = positions >= skipped
    states = np.empty((len(hidden), 5, hidden.shape[1]), dtype=np.float32)
    terms = {
        SUM: (np.add, np.where(counts, hidden, 0)),
        WEIGHTED_SUM: (np.add, np.where(counts, hidden * (positions + 1), 0)),
        MAXIMUM: (np.maximum, np.where(counts, hidden, -np.inf)),
    }
    for row, (operation, values) in terms.items():
        states[:, row] = operation.accumulate(np.concatenate([begin[row][None], values]), axis=0)[1:]
    states[:, FIRST] = begin[FIRST]
    if start <= skipped < start + len(hidden):
        states[skipped - start :, FIRST] = hidden[skipped - start]
    states[:, LAST] = hidden
    return states


def pooled(states: np.ndarray, lengths: np.ndarray, skipped: np.ndarray, modes: Sequence[str]) -> np.ndarray:
    """Return the pooled vectors of sequences, float32 [n, modes * width].

    states: float32 [n, 5, width], after all tokens. lengths: tokens of each sequence. skipped: the tokens at
    the front that pooling leaves out; at least the last token is pooled. Both int64 [n]. Raises ValueError if
    a mode is unknown.
    """
    only_last = skipped >= lengths
    parts = [
        np.where(only_last[:, None], states[:, LAST], _pooled(states, lengths, skipped, mode))
        for mode in modes
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _pooled(states: np.ndarray, lengths: np.ndarray, skipped: np.ndarray, mode: str) -> np.ndarray:
    count = np.maximum(lengths - skipped, 1).astype(np.float32)[:, None]
    match mode:
        case "lasttoken":
            found = states[:, LAST]
        case "cls":
            found = states[:, FIRST]
        case "max":
            found = states[:, MAXIMUM]
        case "mean":
            found = states[:, SUM] / count
        case "mean_sqrt_len_tokens":
            found = states[:, SUM] / np.sqrt(count)
        case "weightedmean":
            weights = (lengths * (lengths + 1) - skipped * (skipped + 1)) / 2
            found = states[:, WEIGHTED_SUM] / np.maximum(weights, 1).astype(np.float32)[:, None]
        case _:
            raise ValueError(f"unknown pooling mode {mode}")
    return found
