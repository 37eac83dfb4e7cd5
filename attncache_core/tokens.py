"""A packed batch: the tokens of many sequences end to end, with no padding.

Sequences of one length (and one way through attention) stand next to each other: a Group of them is a slice
of the packed tokens and becomes [sequences, length, ...] without a copy. A Bucket takes those of similar
length together, for attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import torch

# Measured on batches of 64 questions of 5 to 60 tokens: attention in buckets of eight lengths takes half the
# time of a step for every length.
_BUCKET = 8
_BUCKETS_BELOW = 80


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring sequences of one length in a packed batch."""

    first: int  # index of the first sequence, in packed order
    count: int  # sequences
    first_token: int
    length: int  # tokens of each sequence

    @property
    def tokens(self) -> slice:
        """Where the group's tokens stand in the packed batch."""
        return slice(self.first_token, self.first_token + self.count * self.length)

    @property
    def sequences(self) -> slice:
        """Where the group's sequences stand in packed order."""
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences of similar length, to be computed side by side as if of one.

    A sequence shorter than `length` is filled up with its last token, which `mask` hides from the others;
    what is computed for the filling is dropped. Sequences of one length are views, without mask.
    """

    first: int  # index of the first sequence, in packed order
    tokens: slice  # where the tokens stand in the packed batch
    count: int  # sequences
    length: int  # tokens of the longest
    rows: torch.Tensor | None  # int64 [count * length]: token at each place; None if all are of one length
    kept: torch.Tensor | None  # int64 [tokens]: the place of each token
    mask: torch.Tensor | None  # float32 [count, 1, length], 0 or -inf where a key is filling

    def counted_from(self, first: int) -> Bucket:
        """The same sequences in a packed tensor that begins with token `first` of this one."""
        tokens = slice(self.tokens.start - first, self.tokens.stop - first)
        return replace(self, tokens=tokens, rows=None if self.rows is None else self.rows - first)

    def spread(self, packed: torch.Tensor) -> torch.Tensor:
        """The sequences of a packed [tokens, ...] tensor side by side, [count, length, ...]."""
        side_by_side = packed[self.tokens] if self.rows is None else packed.index_select(0, self.rows)
        return side_by_side.unflatten(0, (self.count, self.length))

    def collect(self, side_by_side: torch.Tensor, packed: torch.Tensor) -> None:
        """Write what was computed for [count, length, ...] to its tokens of a packed tensor."""
        rows = side_by_side.flatten(0, 1)
        packed[self.tokens] = rows if self.kept is None else rows.index_select(0, self.kept)


@dataclass(frozen=True)
class TokenBatch:
    """Token sequences in packed order.

    `order[i]` is the caller's index of the packed sequence i; `lengths` are tokens, in packed order.
    """

    ids: torch.Tensor  # int64 [tokens]
    lengths: np.ndarray  # int64 [sequences]
    order: np.ndarray  # int64 [sequences]

    @cached_property
    def offsets(self) -> np.ndarray:
        """First token of each packed sequence, and the number of tokens at the end: [sequences + 1]."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its own sequence: int64 [tokens]."""
        starts = np.repeat(self.offsets[:-1], self.lengths)
        return torch.from_numpy(np.arange(self.offsets[-1]) - starts)

    def groups(self, first: int = 0, end: int | None = None) -> list[Group]:
        """The runs of equal length among the packed sequences [first, end)."""
        groups = []
        for length, run in groupby(self.lengths[first:end].tolist()):
            count = len(list(run))
            groups.append(Group(first, count, int(self.offsets[first]), length))
            first += count
        return groups

    def buckets(self, first: int = 0, end: int | None = None) -> list[Bucket]:
        """The packed sequences [first, end), those of similar length together; lengths must rise.

        Similar are short sequences whose lengths round up to the same multiple of eight: what is computed
        for the filling costs less than more and smaller steps. Longer ones are together if equally long.
        """
        lengths = self.lengths[first:end]
        rounded = np.where(lengths < _BUCKETS_BELOW, -(-lengths // _BUCKET) * _BUCKET, lengths)
        borders = np.flatnonzero(np.diff(rounded, prepend=-1, append=-1)).tolist()
        return [self._bucket(first + start, first + stop) for start, stop in pairwise(borders)]

    def _bucket(self, first: int, end: int) -> Bucket:
        lengths, starts = self.lengths[first:end, None], self.offsets[first:end, None]  # [count, 1]
        tokens = slice(int(self.offsets[first]), int(self.offsets[end]))
        longest = int(lengths.max())
        if lengths.min() == longest:
            return Bucket(first, tokens, end - first, longest, None, None, None)
        places = np.arange(longest)  # [longest]
        filling = places >= lengths  # [count, longest]
        rows = torch.from_numpy((starts + np.minimum(places, lengths - 1)).ravel())
        mask = torch.zeros(end - first, 1, longest).masked_fill_(
            torch.from_numpy(filling[:, None]), float("-inf")
        )
        kept = torch.from_numpy(np.flatnonzero(~filling.ravel()))
        return Bucket(first, tokens, end - first, longest, rows, kept, mask)

    def reordered(self, permutation: np.ndarray) -> tuple[TokenBatch, torch.Tensor]:
        """The batch with packed sequence `permutation[i]` at place i, and the token index that does it.

        `index` is int64 [tokens]: `hidden[index]` moves the activations of this batch along.
        """
        lengths = self.lengths[permutation]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        index = torch.from_numpy(
            np.repeat(self.offsets[permutation] - starts[:-1], lengths) + np.arange(starts[-1])
        )
        return TokenBatch(self.ids[index], lengths, self.order[permutation]), index

    def in_callers_order(self, rows: np.ndarray) -> np.ndarray:
        """Rows [sequences, ...] in packed order, returned in the order the sequences were given in."""
        result = np.empty_like(rows)
        result[self.order] = rows
        return result


def pack(sequences: Sequence[Sequence[int]]) -> TokenBatch:
    """Token sequences (each of at least one token) packed in order of their length."""
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("a batch needs at least one sequence, and a sequence at least one token")
    order = np.argsort(lengths, kind="stable")
    ids = np.concatenate([np.asarray(sequences[i], dtype=np.int64) for i in order])
    return TokenBatch(torch.from_numpy(ids), lengths[order], order)


def by_sequence(packed: torch.Tensor, group: Group) -> torch.Tensor:
    """A group's rows of a packed [tokens, ...] tensor, as a view [sequences, L, ...]."""
    return packed[group.tokens].unflatten(0, (group.count, group.length))
