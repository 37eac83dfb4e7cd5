"""Pack a batch: the tokens of many sequences in one tensor, one sequence after another, without padding.

Sequences of the same length (and with the same reuse decision) are neighbours in a batch. A Group of such
sequences is a slice of the packed tokens, and becomes [sequences, length, ...] without a copy.

A batch can be *filled*: a few filler tokens, which belong to no sequence, follow the last sequence, so that
the number of tokens is a round number. oneDNN builds one kernel per number of rows, and building a kernel
takes as long as the matrix product itself, so the number of different sizes must be small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring sequences of the same length in a packed batch."""

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
    """Token sequences in packed order, followed by filler tokens if the batch is filled."""

    ids: torch.Tensor  # int64 [tokens], token ids; the id of a filler is 0
    lengths: np.ndarray  # int64 [sequences], tokens of each sequence, in packed order
    order: np.ndarray  # int64 [sequences]: order[i] is the caller's index of packed sequence i
    # int64 [sequences], number of prompt tokens at the front of each sequence; None: the number of tokens of
    # the model's default prompt
    prompt_tokens: np.ndarray | None = None

    @cached_property
    def offsets(self) -> np.ndarray:
        """Index of the first token of each packed sequence and of the fillers, int64 [sequences + 1]."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its own sequence, int64 [tokens]; 0 for fillers."""
        positions = np.zeros(len(self.ids), dtype=np.int64)
        end = self.offsets[-1]
        positions[:end] = np.arange(end) - np.repeat(self.offsets[:-1], self.lengths)
        return torch.from_numpy(positions).to(self.ids.device)

    def context_like(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `value` (V [tokens, h, d_v]) to write maps @ V to.

        The rows of fillers are zero; all other rows are uninitialised.
        """
        context = torch.empty_like(value)
        context[self.offsets[-1] :] = 0
        return context

    def on(self, device: torch.device) -> TokenBatch:
        """Return the batch with its tensors on `device`."""
        return self if self.ids.device == device else replace(self, ids=self.ids.to(device))

    def filled(self) -> TokenBatch:
        """Return the batch with fillers at its end, which make the number of tokens a round number."""
        tokens = len(self.ids)
        fillers = self.ids.new_zeros(rounded_up(tokens) - tokens)
        return replace(self, ids=torch.cat([self.ids, fillers])) if len(fillers) else self

    def groups(self, first: int = 0, end: int | None = None) -> list[Group]:
        """Return a Group for each run of equal lengths in the packed sequences [first, end)."""
        groups = []
        for length, run in groupby(self.lengths[first:end].tolist()):
            count = len(list(run))
            groups.append(Group(first, count, int(self.offsets[first]), length))
            first += count
        return groups

    def reordered(self, permutation: np.ndarray) -> tuple[TokenBatch, torch.Tensor]:
        """Return the batch with packed sequence `permutation[i]` at index i, and the token index of the move.

        The token index is int64 [tokens]: `hidden[index]` reorders the activations of this batch in the
        same way. Fillers stay at the end.
        """
        lengths = self.lengths[permutation]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        sources = np.arange(len(self.ids))
        sources[: starts[-1]] += np.repeat(self.offsets[permutation] - starts[:-1], lengths)
        index = torch.from_numpy(sources).to(self.ids.device)
        prompt_tokens = None if self.prompt_tokens is None else self.prompt_tokens[permutation]
        return TokenBatch(self.ids[index], lengths, self.order[permutation], prompt_tokens), index

    def in_callers_order(self, rows: np.ndarray) -> np.ndarray:
        """Reorder rows [sequences, ...] from packed order to the order of the caller's sequences."""
        result = np.empty_like(rows)
        result[self.order] = rows
        return result


def pack(sequences: Sequence[Sequence[int]], prompt_tokens: Sequence[int] | None = None) -> TokenBatch:
    """Pack token sequences in order of their length; sequences of equal length keep the caller's order.

    prompt_tokens: number of prompt tokens of each sequence, if prompts differ; see TokenBatch.
    Raises ValueError if there is no sequence or a sequence has no token.
    """
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("a batch needs at least one sequence, and a sequence at least one token")
    order = np.argsort(lengths, kind="stable")
    ids = np.concatenate([np.asarray(sequences[i], dtype=np.int64) for i in order])
    own = None if prompt_tokens is None else np.asarray(prompt_tokens, dtype=np.int64)[order]
    return TokenBatch(torch.from_numpy(ids), lengths[order], order, own)


def rounded_up(tokens: int) -> int:
    """Return the next round number of tokens.

    Round numbers are the multiples of 8 up to 512, and 32 equally spaced numbers between each larger power of
    two and the next one.
    """
    step = 1 << max(3, tokens.bit_length() - 6)
    return -(-tokens // step) * step


def by_sequence(packed: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the rows of a group in a packed [tokens, ...] tensor, as a view [sequences, L, ...]."""
    return packed[group.tokens].unflatten(0, (group.count, group.length))
