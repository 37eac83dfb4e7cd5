"""A packed batch: the tokens of many sequences end to end, with no padding.

Sequences of one length (and one way through attention) stand next to each other: a Group of them is a slice
of the packed tokens and becomes [sequences, length, ...] without a copy.

A batch that is served is *filled*: behind the last sequence stand a few tokens that are no sequence's, to
make their number a round one. oneDNN builds a kernel for each number of rows that it meets, which takes as
long as the product itself: these numbers should be few.
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
class TokenBatch:
    """Token sequences in packed order, and fillers behind them if it is filled.

    `order[i]` is the caller's index of the packed sequence i; `lengths` are tokens, in packed order.
    """

    ids: torch.Tensor  # int64 [tokens], those of fillers 0
    lengths: np.ndarray  # int64 [sequences]
    order: np.ndarray  # int64 [sequences]
    # int64 [sequences], tokens at the front that are a prompt's; None: as many as the model's own prompt has.
    prompt_tokens: np.ndarray | None = None

    @cached_property
    def offsets(self) -> np.ndarray:
        """First token of each packed sequence, and of the fillers at the end: [sequences + 1]."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its own sequence, 0 of fillers: int64 [tokens]."""
        positions = np.zeros(len(self.ids), dtype=np.int64)
        end = self.offsets[-1]
        positions[:end] = np.arange(end) - np.repeat(self.offsets[:-1], self.lengths)
        return torch.from_numpy(positions).to(self.ids.device)

    def context_like(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor like V [tokens, h, d_v] for maps @ V to be written to; zero for fillers."""
        context = torch.empty_like(value)
        context[self.offsets[-1] :] = 0
        return context

    def on(self, device: torch.device) -> TokenBatch:
        """The batch with its tensors on this device."""
        return self if self.ids.device == device else replace(self, ids=self.ids.to(device))

    def filled(self) -> TokenBatch:
        """The batch with so many fillers behind it that the number of tokens is a round one."""
        tokens = len(self.ids)
        fillers = self.ids.new_zeros(rounded_up(tokens) - tokens)
        return replace(self, ids=torch.cat([self.ids, fillers])) if len(fillers) else self

    def groups(self, first: int = 0, end: int | None = None) -> list[Group]:
        """The runs of equal length among the packed sequences [first, end)."""
        groups = []
        for length, run in groupby(self.lengths[first:end].tolist()):
            count = len(list(run))
            groups.append(Group(first, count, int(self.offsets[first]), length))
            first += count
        return groups

    def reordered(self, permutation: np.ndarray) -> tuple[TokenBatch, torch.Tensor]:
        """The batch with packed sequence `permutation[i]` at place i, and the token index that does it.

        `index` is int64 [tokens]: `hidden[index]` moves the activations of this batch along.
        """
        lengths = self.lengths[permutation]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        places = np.arange(len(self.ids))
        places[: starts[-1]] += np.repeat(self.offsets[permutation] - starts[:-1], lengths)
        index = torch.from_numpy(places).to(self.ids.device)
        prompt_tokens = None if self.prompt_tokens is None else self.prompt_tokens[permutation]
        return TokenBatch(self.ids[index], lengths, self.order[permutation], prompt_tokens), index

    def in_callers_order(self, rows: np.ndarray) -> np.ndarray:
        """Rows [sequences, ...] in packed order, returned in the order the sequences were given in."""
        result = np.empty_like(rows)
        result[self.order] = rows
        return result


def pack(sequences: Sequence[Sequence[int]], prompt_tokens: Sequence[int] | None = None) -> TokenBatch:
    """Token sequences (each of at least one token) packed in order of their length.

    prompt_tokens: of each, where prompts differ; see TokenBatch.
    """
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("a batch needs at least one sequence, and a sequence at least one token")
    order = np.argsort(lengths, kind="stable")
    ids = np.concatenate([np.asarray(sequences[i], dtype=np.int64) for i in order])
    own = None if prompt_tokens is None else np.asarray(prompt_tokens, dtype=np.int64)[order]
    return TokenBatch(torch.from_numpy(ids), lengths[order], order, own)


def rounded_up(tokens: int) -> int:
    """The next round number: a multiple of 8, and from 512 on one of 32 numbers up to each double."""
    step = 1 << max(3, tokens.bit_length() - 6)
    return -(-tokens // step) * step


def by_sequence(packed: torch.Tensor, group: Group) -> torch.Tensor:
    """A group's rows of a packed [tokens, ...] tensor, as a view [sequences, L, ...]."""
    return packed[group.tokens].unflatten(0, (group.count, group.length))
