"""Find the prefixes that token sequences share, so that each distinct prefix is computed once.

    sequences -> sorted -> tokens that each sequence shares with the sequence before it -> PrefixTree of runs

A *run* is a range of packed rows, one row per token. A run continues its parent: the tokens of a sequence are
the tokens of all runs on the path from a root to the last run of the sequence. In a causal model no token
depends on a later token, so all sequences that begin with the same tokens can share the rows of these tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import torch

# The sequences of a tree share its root only if this saves at least one token in so many that remain.
# Otherwise a short template, or the token that begins every text, would join all texts of a batch into one
# tree, and trees are the largest units that can be computed independently of each other.
_MIN_SAVING = 8
# A block of several runs has at most this many rows. The rows of a block are compared with each other even if
# they cannot see each other, and this work grows with the square of the rows.
_BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows whose attention is computed together: neighbouring runs below one parent, or a part of a run."""

    rows: slice  # the rows that attend
    before: torch.Tensor  # int64 [rows before], the rows that all of them can see, in order of position
    visible: torch.Tensor  # bool [rows, rows before + rows], whether a row attends to a row


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Token sequences as a forest of runs.

    Runs are in depth-first order: a parent comes before its children, and the rows of a run and of all its
    descendants are contiguous. Every sequence ends at the end of a run.
    """

    parents: np.ndarray  # int64 [runs], index of the run that each run continues; -1: the run is a root
    starts: np.ndarray  # int64 [runs], position of the first token of each run in its sequences
    offsets: np.ndarray  # int64 [runs + 1], first row of each run
    ends: np.ndarray  # int64 [sequences], the last run of each sequence
    given: np.ndarray | None = None  # bool [runs], whether rows are only seen by others; None: no run is
    _blocks: dict[tuple[int, torch.device], list[Block]] = field(default_factory=dict, init=False)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, from its root to its end: int64 [sequences]."""
        return (self.starts + np.diff(self.offsets))[self.ends]

    @cached_property
    def trees(self) -> np.ndarray:
        """The first run of each tree, and the number of runs, int64 [trees + 1]."""
        return np.append(np.flatnonzero(self.parents < 0), len(self.parents))

    @cached_property
    def descendants_end(self) -> np.ndarray:
        """The first run that comes after each run and all its descendants, int64 [runs].

        A row k can be seen by the rows from k to the last row of the descendants of k's run, and by no other
        row.
        """
        ends = list(range(1, len(self.parents) + 1))
        for run, parent in reversed(list(enumerate(self.parents.tolist()))):
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[run])
        return np.array(ends, dtype=np.int64)

    def with_given_tokens(self) -> tuple[PrefixTree, np.ndarray]:
        """Return the tree with a run for the tokens in front of each root, and where each row went.

        The root of a tree may start behind tokens that are no rows of this tree, because their keys and
        values are given. The second result is the new index of each row, int64 [rows].
        """
        parents: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        runs: list[int] = []  # the new index of each run
        for first, end in pairwise(self.trees.tolist()):
            if cached := int(self.starts[first]):
                parents.append(-1)
                starts.append(0)
                lengths.append(cached)
            for run in range(first, end):
                parent = int(self.parents[run])
                parents.append(runs[parent] if parent >= 0 else len(parents) - 1 if cached else -1)
                starts.append(int(self.starts[run]))
                lengths.append(int(self.offsets[run + 1] - self.offsets[run]))
                runs.append(len(parents) - 1)
        index = np.array(runs, dtype=np.int64)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        given = np.ones(len(parents), dtype=bool)
        given[index] = False
        whole = PrefixTree(np.array(parents), np.array(starts), offsets, index[self.ends], given)
        return whole, _counted(np.diff(self.offsets)) + np.repeat(offsets[index], np.diff(self.offsets))

    def rows(self, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the row of the token at positions[i] of sequence sequences[i], int64 [n]."""
        runs = self.ends[sequences]
        while (above := positions < self.starts[runs]).any():
            runs[above] = self.parents[runs[above]]
        found: np.ndarray = self.offsets[runs] + positions - self.starts[runs]
        return found

    def of_sequences(self, runs: np.ndarray) -> np.ndarray:
        """Return for each sequence whether `runs` (bool [runs]) holds for all its runs: bool [sequences]."""
        whole = runs.copy()
        for run, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                whole[run] &= whole[parent]
        return whole[self.ends]

    @property
    def alone(self) -> list[np.ndarray]:
        """The runs that see only themselves and are no part of a block, as ranges of neighbours.

        Each range is the offsets of its runs, int64 [runs of the range + 1].
        """
        alone, _ = self._parts
        return [self.offsets[first : end + 1] for first, end in alone]

    def blocks(self, before: int | None, device: torch.device) -> list[Block]:
        """Return the blocks of all rows that are not `alone`. Computed once per window and device.

        before: a token attends to at most this many tokens before itself; None: no bound.
        """
        reach = int(self.offsets[-1]) if before is None else before
        if (reach, device) not in self._blocks:
            _, parts = self._parts
            self._blocks[reach, device] = [self._block(rows, run, reach, device) for rows, run in parts]
        return self._blocks[reach, device]

    def single_rows(self, before: int | None, device: torch.device) -> Iterator[Block]:
        """Yield the blocks' rows as blocks of one row each, which read no row that they cannot see."""
        reach = int(self.offsets[-1]) if before is None else before
        _, parts = self._parts
        for rows, _ in parts:
            for row in range(rows.start, rows.stop):
                run = int(self._run_of[row])
                yield self._block(slice(row, row + 1), run, reach, device)

    @cached_property
    def _run_of(self) -> np.ndarray:
        """The run of each row, int64 [rows]."""
        return np.repeat(np.arange(len(self.parents)), np.diff(self.offsets))

    @cached_property
    def _positions(self) -> np.ndarray:
        """The position of each row, int64 [rows]."""
        return np.arange(self.offsets[-1]) + (self.starts - self.offsets[:-1])[self._run_of]

    @cached_property
    def _parts(self) -> tuple[list[tuple[int, int]], list[tuple[slice, int]]]:
        """Divide the tree: (ranges of runs that are alone, (rows, first run of the rows) of each block).

        A root is alone if it has no children, or if its tree is too large for one block. A large root that is
        given is in neither part.
        """
        alone: list[tuple[int, int]] = []
        parts: list[tuple[slice, int]] = []
        offsets, ends = self.offsets.tolist(), self.descendants_end.tolist()
        pending = [(0, len(self.parents))]  # ranges of runs: siblings and their descendants
        while pending:
            first, end = pending.pop()
            run = first
            while run < end:
                after, is_root = ends[run], self.parents[run] < 0
                large = offsets[after] - offsets[run] > _BLOCK_ROWS
                if is_root and (large or after == run + 1):
                    if self.given is None or not self.given[run]:
                        joins = alone and alone[-1][1] == run
                        alone.append((alone.pop()[0] if joins else run, run + 1))
                elif large:
                    cuts = [*range(offsets[run], offsets[run + 1], _BLOCK_ROWS), offsets[run + 1]]
                    parts += [(slice(*rows), run) for rows in pairwise(cuts)]
                else:
                    while not is_root and after < end and offsets[ends[after]] - offsets[run] <= _BLOCK_ROWS:
                        after = ends[after]
                    parts.append((slice(offsets[run], offsets[after]), run))
                if large:
                    pending.append((run + 1, after))
                run = after
        return alone, parts

    def _block(self, rows: slice, run: int, reach: int, device: torch.device) -> Block:
        """Return the block of these rows. run: the run of the first row."""
        path = [np.arange(self.offsets[run], rows.start)]
        while (run := int(self.parents[run])) >= 0:
            path.append(np.arange(self.offsets[run], self.offsets[run + 1]))
        before = np.concatenate(path[::-1])
        indices = np.arange(rows.start, rows.stop)
        last = self.offsets[self.descendants_end[self._run_of[indices]]]  # of the rows that see each row
        inside = (indices <= indices[:, None]) & (indices[:, None] < last)
        visible = np.concatenate([np.ones((len(indices), len(before)), dtype=bool), inside], axis=1)
        positions = self._positions[np.concatenate([before, indices])]
        visible &= self._positions[indices][:, None] - positions <= reach
        return Block(rows, torch.from_numpy(before).to(device), torch.from_numpy(visible).to(device))


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """A batch of sequences as a tree."""

    ids: np.ndarray  # int64 [rows], token ids
    order: np.ndarray  # int64 [sequences]: order[i] is the caller's index of sequence i of the tree
    tree: PrefixTree


def shared_prefixes(
    sequences: Sequence[Sequence[int]], groups: Sequence[Hashable] | None = None
) -> SharedPrefixes | None:
    """Return the tree of token sequences with at least one token each; None if sharing saves too little.

    A sequence that begins another sequence, or equals it, is a path of the tree without rows of its own.
    groups: sequences share prefixes only inside a group; None: all are one group.
    """
    none = np.zeros(len(sequences), dtype=np.int64)
    found = _forest(sequences, _numbered(groups or [None] * len(sequences)), none)
    return found if len(found.tree.trees) <= len(sequences) else None


def continued_prefixes(
    sequences: Sequence[Sequence[int]], groups: Sequence[Hashable], cached: Sequence[int]
) -> SharedPrefixes:
    """Return the tree of sequences of which the first cached[i] tokens are no rows of the tree.

    sequences: the other tokens of each sequence, at least one. groups: sequences share prefixes only inside a
    group, and all sequences of a group have the same cached tokens.
    """
    found = _forest(sequences, _numbered(groups), np.asarray(cached, dtype=np.int64))
    tree = found.tree
    starts = np.zeros(len(tree.parents), dtype=np.int64)
    starts[tree.ends] = np.asarray(cached, dtype=np.int64)[found.order]
    # A root has the cached tokens of any sequence that ends below it, and passes them on to its descendants.
    roots = tree.trees[:-1]
    of_trees = np.maximum.reduceat(starts, roots)
    return replace(found, tree=replace(tree, starts=tree.starts + np.repeat(of_trees, np.diff(tree.trees))))


def _numbered(groups: Sequence[Hashable]) -> np.ndarray:
    """Return a number for each group, int64 [n]."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64)


def _forest(sequences: Sequence[Sequence[int]], groups: np.ndarray, cached: np.ndarray) -> SharedPrefixes:
    """Return the tree of sequences, which share prefixes where it pays, inside their groups (int64 [n]).

    cached: the tokens in front of each sequence that are no rows, int64 [n]; equal inside a group.
    """
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    flat = np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=int(lengths.sum()))
    firsts = np.cumsum(lengths) - lengths
    order = _sorted(flat, firsts, lengths, groups)
    lengths, firsts, groups = lengths[order], firsts[order], groups[order]
    common = _common_with_previous(flat, firsts, lengths)
    common[1:][groups[1:] != groups[:-1]] = 0
    shared = _worthwhile(common, lengths, cached[order])
    added = lengths - shared
    sources = np.repeat(firsts + shared, added) + _counted(added)
    return SharedPrefixes(flat[sources], order, _tree(shared, added))


def added_tokens(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return for each sequence the number of its tokens that it does not share with the sequence before it.

    The result for a sequence that equals the sequence before it is 0.
    """
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    flat = np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=int(lengths.sum()))
    added: list[int] = (lengths - _common_with_previous(flat, np.cumsum(lengths) - lengths, lengths)).tolist()
    return added


def _sorted(flat: np.ndarray, firsts: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the lexicographic order of sequences in `flat`, group by group: int64 [sequences]."""
    # The bytes of big-endian numbers have the order of the numbers.
    numbers = flat.astype(">i8").tobytes()
    width = 8
    keys = [
        (group, numbers[width * first : width * (first + length)])
        for first, length, group in zip(firsts.tolist(), lengths.tolist(), groups.tolist(), strict=True)
    ]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def _common_with_previous(flat: np.ndarray, firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the number of tokens with which each sequence and the previous sequence begin, int64 [n]."""
    shorter = np.minimum(lengths[1:], lengths[:-1])
    places = _counted(shorter)
    left, right = (flat[np.repeat(each, shorter) + places] for each in (firsts[:-1], firsts[1:]))
    common = np.zeros(len(lengths), dtype=np.int64)
    if len(shorter):
        differing = np.where(left != right, places, len(flat))
        common[1:] = np.minimum(shorter, np.minimum.reduceat(differing, np.cumsum(shorter) - shorter))
    return common


def _counted(counts: np.ndarray) -> np.ndarray:
    """Return 0 to counts[0] - 1, then 0 to counts[1] - 1, and so on."""
    starts = np.cumsum(counts) - counts
    counted: np.ndarray = np.arange(counts.sum()) - np.repeat(starts, counts)
    return counted


def _worthwhile(shared: np.ndarray, lengths: np.ndarray, cached: np.ndarray) -> np.ndarray:
    """Return `shared` with 0 where two trees are better than one; see _MIN_SAVING.

    shared: tokens that each sorted sequence shares with the previous sequence. cached: tokens in front of it.
    A tree saves these too, because they are laid out once per tree. All int64 [sequences].
    """
    kept = shared.copy()
    ends = np.concatenate(([0], np.cumsum(lengths - shared)))
    pending = [(0, len(shared))]
    while pending:
        first, end = pending.pop()
        inner = shared[first + 1 : end]
        if not len(inner):
            continue
        root = int(inner.min())
        joints = first + 1 + np.flatnonzero(inner == root)
        distinct = int(ends[end] - ends[first] + shared[first])
        saved = (root + int(cached[first])) * len(joints)
        if saved * _MIN_SAVING < distinct or not root:
            kept[joints] = 0
            pending += pairwise([first, *joints.tolist(), end])
    return kept


def _tree(shared: np.ndarray, added: np.ndarray) -> PrefixTree:
    """Return the tree of sorted sequences.

    shared: tokens that each sequence shares with the previous sequence. added: its other tokens; both int64
    [sequences].
    """
    first_rows = np.cumsum(added) - added
    branching = np.flatnonzero(shared)
    sharing = _last_smaller(shared)[branching]  # the sequence that added the last shared token
    last_shared = first_rows[sharing] + shared[branching] - shared[sharing] - 1  # the row of that token
    total, adding = int(added.sum()), np.flatnonzero(added)
    firsts = np.unique(np.concatenate([first_rows[adding], last_shared + 1]))
    firsts = firsts[firsts < total]
    # The sequence that added each run.
    of = adding[np.searchsorted(first_rows[adding], firsts, side="right") - 1]
    inside = firsts - first_rows[of]
    joined = np.full(len(shared), -1)
    joined[branching] = np.searchsorted(firsts, last_shared, side="right") - 1
    return PrefixTree(
        parents=np.where(inside > 0, np.arange(len(firsts)) - 1, joined[of]),
        starts=shared[of] + inside,
        offsets=np.append(firsts, total),
        ends=np.searchsorted(firsts, first_rows + added - 1, side="right") - 1,
    )


def _last_smaller(numbers: np.ndarray) -> np.ndarray:
    """Return for each number the index of the last smaller number before it, or -1: int64 [n]."""
    found, rising, values = [], [-1], numbers.tolist()
    for index, number in enumerate(values):
        while rising[-1] >= 0 and values[rising[-1]] >= number:
            rising.pop()
        found.append(rising[-1])
        rising.append(index)
    return np.array(found, dtype=np.int64)
