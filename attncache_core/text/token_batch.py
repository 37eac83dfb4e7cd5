"""Pack a batch: the tokens of many sequences in one tensor, one sequence after another, without padding.

Sequences of the same length (and with the same reuse decision) are neighbours in a batch. A Group of such
sequences is a slice of the packed tokens, and becomes [sequences, length, ...] without a copy.

The sequences of a causal model can also be packed as a tree of runs (prefix_tree.py), in which a prefix that
several sequences share is packed once. In a batch without a tree, every sequence is a run of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby

import numpy as np
import torch

from attncache_core.text.pairs import token_types
from attncache_core.text.prefix_tree import PrefixTree, shared_prefixes


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring sequences of the same length in a packed batch without a tree."""

    first: int  # index of the first sequence, in packed order
    count: int  # number of sequences
    first_token: int  # index of the first token of the first sequence
    length: int  # tokens of each sequence

    @property
    def tokens(self) -> slice:
        """The slice of the packed tokens that holds the group's tokens."""
        return slice(self.first_token, self.first_token + self.count * self.length)

    @property
    def sequences(self) -> slice:
        """The slice of the packed sequences that holds the group's sequences."""
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True)
class TokenBatch:
    """Runs of tokens in packed order. Without a tree, run i is packed sequence i."""

    ids: torch.Tensor  # int64 [tokens], token ids
    lengths: np.ndarray  # int64 [runs], tokens of each run, in packed order
    order: np.ndarray  # int64 [sequences]: order[i] is the caller's index of packed sequence i
    # int64 [sequences], number of prompt tokens at the front of each sequence; None: the number of tokens of
    # the model's default prompt
    prompt_tokens: np.ndarray | None = None
    tree: PrefixTree | None = None  # which run each run continues; None: every sequence is a run of its own
    # int64 [tokens], token types, which encoders tell the texts of a pair apart by; None: every token has
    # type 0. A batch with a tree has none, because causal models have no types.
    types: torch.Tensor | None = None
    # int64 [tokens], position of each token in its sequence; None: the tokens of a run follow each other
    scattered: torch.Tensor | None = None

    @cached_property
    def offsets(self) -> np.ndarray:
        """Index of the first token of each run, and their end, int64 [runs + 1]."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its own sequence, int64 [tokens]."""
        if self.scattered is not None:
            return self.scattered
        starts = 0 if self.tree is None else self.tree.starts
        positions = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1] - starts, self.lengths)
        return torch.from_numpy(positions).to(self.ids.device)

    @cached_property
    def _is_in_callers_order(self) -> bool:
        return len(self.order) == 1 or bool((self.order[1:] > self.order[:-1]).all())

    @property
    def last_rows(self) -> np.ndarray:
        """Index of the last token of each packed sequence, int64 [sequences]."""
        last: np.ndarray = self.offsets[1:] - 1
        return last if self.tree is None else last[self.tree.ends]

    def rows(self, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the index of the token at positions[i] of the caller's sequence sequences[i], int64 [n]."""
        packed = np.empty_like(self.order)
        packed[self.order] = np.arange(len(self.order))
        if self.tree is not None:
            return self.tree.rows(packed[sequences], positions)
        found: np.ndarray = self.offsets[packed[sequences]] + positions
        return found

    def apart(self, packed: torch.Tensor) -> tuple[TokenBatch, torch.Tensor]:
        """Return a batch of the same sequences without a tree, and `packed` [tokens, ...] in its order.

        Without a tree, nothing changes.
        """
        if self.tree is None:
            return self, packed
        lengths = self.tree.lengths
        sequences = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(sequences)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        index = torch.from_numpy(self.tree.rows(sequences, positions)).to(self.ids.device)
        return TokenBatch(self.ids[index], lengths, self.order, self.prompt_tokens), packed[index]

    def on(self, device: torch.device) -> TokenBatch:
        """Return the batch with its tensors on `device`."""
        if self.ids.device == device:
            return self
        types = None if self.types is None else self.types.to(device)
        scattered = None if self.scattered is None else self.scattered.to(device)
        return replace(self, ids=self.ids.to(device), types=types, scattered=scattered)

    def groups(self, first: int = 0, end: int | None = None) -> list[Group]:
        """Return a Group for each stretch of equal lengths in the packed sequences [first, end).

        Only for batches without a tree.
        """
        groups = []
        for length, neighbours in groupby(self.lengths[first:end].tolist()):
            count = len(list(neighbours))
            groups.append(Group(first, count, int(self.offsets[first]), length))
            first += count
        return groups

    def reordered(self, permutation: np.ndarray) -> tuple[TokenBatch, torch.Tensor]:
        """Return the batch with packed sequence `permutation[i]` at index i, and the token index of the move.

        The token index is int64 [tokens]: `hidden[index]` reorders the activations of this batch in the
        same way. Only for batches without a tree.
        """
        lengths = self.lengths[permutation]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        sources = np.arange(len(self.ids))
        sources[: starts[-1]] += np.repeat(self.offsets[permutation] - starts[:-1], lengths)
        index = torch.from_numpy(sources).to(self.ids.device)
        prompt_tokens = None if self.prompt_tokens is None else self.prompt_tokens[permutation]
        types = None if self.types is None else self.types[index]
        order = self.order[permutation]
        return TokenBatch(self.ids[index], lengths, order, prompt_tokens, types=types), index

    def in_callers_order(self, rows: np.ndarray) -> np.ndarray:
        """Reorder rows [sequences, ...] from packed order to the order of the caller's sequences."""
        if self._is_in_callers_order:
            return rows
        result = np.empty_like(rows)
        result[self.order] = rows
        return result


def pack(sequences: Sequence[Sequence[int]], prompt_tokens: Sequence[int] | None = None) -> TokenBatch:
    """Pack token sequences in order of their length; sequences of equal length keep the caller's order.

    PairTokens keep their types.
    prompt_tokens: number of prompt tokens of each sequence, if prompts differ; see TokenBatch.
    Raises ValueError if there is no sequence or a sequence has no token.
    """
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    require_tokens(lengths)
    order = lengths.argsort(kind="stable")
    ordered = [sequences[index] for index in order.tolist()]
    ids = np.fromiter(chain.from_iterable(ordered), dtype=np.int64, count=int(lengths.sum()))
    in_order = None if prompt_tokens is None else np.asarray(prompt_tokens, dtype=np.int64)[order]
    types = packed_types(ordered)
    tensor = None if types is None else torch.from_numpy(types)
    return TokenBatch(torch.from_numpy(ids), lengths[order], order, in_order, types=tensor)


def require_tokens(lengths: np.ndarray) -> None:
    """Raise ValueError if there is no sequence or a sequence has no token."""
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("a batch needs at least one sequence, and a sequence at least one token")


def packed_types(sequences: Sequence[Sequence[int]]) -> np.ndarray | None:
    """Return the types of all tokens, int64 [tokens]; None if every token has type 0."""
    of_sequences = [token_types(ids) for ids in sequences]
    if not any(of_sequences):
        return None
    of_tokens = chain.from_iterable(
        types or [0] * len(ids) for types, ids in zip(of_sequences, sequences, strict=True)
    )
    return np.fromiter(of_tokens, np.int64)


def pack_shared(
    sequences: Sequence[Sequence[int]],
    prompt_tokens: Sequence[int] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> TokenBatch:
    """Pack token sequences as a tree, for a causal model; without a tree if sharing saves too little.

    groups: see shared_prefixes. Other arguments and errors as for `pack`.
    """
    found = shared_prefixes(sequences, groups) if all(map(len, sequences)) and sequences else None
    if found is None:
        return pack(sequences, prompt_tokens)
    in_order = None if prompt_tokens is None else np.asarray(prompt_tokens, dtype=np.int64)[found.order]
    lengths = np.diff(found.tree.offsets)
    return TokenBatch(torch.from_numpy(found.ids), lengths, found.order, in_order, found.tree)


def by_sequence(packed: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the rows of a group in a packed [tokens, ...] tensor, as a view [sequences, L, ...]."""
    return packed[group.tokens].unflatten(0, (group.count, group.length))
