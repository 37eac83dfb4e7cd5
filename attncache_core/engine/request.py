"""Requests to the engine.

PrefillRequest: one sequence              -> PrefillBatch -> PrefillEngine.run -> PrefillResult (result.py)
PrefillPart: many sequences, as arrays    ->
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import overload

import numpy as np

from attncache_core.reuse.blend.chunks import Blend
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.text.pairs import PairTokens
from attncache_core.text.prompts import SequencePlan
from attncache_core.text.token_batch import packed_types


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """One token sequence to run through the model."""

    ids: Sequence[int]  # token ids, see PrefillEngine.without_padding; PairTokens for a pair
    # Whether this sequence may reuse anything. A pair takes no attention maps in either case.
    reuse: bool = True
    # Which outputs to read from this sequence; None: the outputs of the default prompt.
    sequence_plan: SequencePlan | None = None
    # How stored keys and values are looked up; None: none are used, and none are stored.
    prefix_key: PrefixKey | None = None
    # Sequences share prefixes inside a batch only with sequences of their group.
    group: Hashable = None
    # The chunks whose keys and values are blended; None: everything is computed exactly.
    blend: Blend | None = None

    @property
    def reads_states(self) -> bool:
        """Whether the last state of every token is read."""
        return self.sequence_plan is not None and self.sequence_plan.states

    @property
    def reads_more(self) -> bool:
        """Whether more than the output is read."""
        plan = self.sequence_plan
        return plan is not None and (plan.states or bool(plan.targets))

    @property
    def takes_maps(self) -> bool:
        """Whether this sequence may take attention maps from records."""
        return self.reuse and not isinstance(self.ids, PairTokens)


@dataclass(slots=True, eq=False)
class PrefillPart:
    """Token sequences that are computed alike: their token ids in one array, and what they have in common.

    What only some sequences have is a list with one entry per sequence, or None.
    """

    ids: np.ndarray  # int64 [tokens], the token ids of one sequence after the other
    offsets: Sequence[int]  # [sequences + 1], first token of each sequence in `ids`, and their end
    reuse: bool = True  # for this and the following, see PrefillRequest
    plans: Sequence[SequencePlan | None] = (None,)  # one for all sequences, or one for each
    group: Hashable = None
    pairs: Sequence[Sequence[int]] | None = None  # all sequences, if one of them is a pair (PairTokens)
    prefix_keys: Sequence[PrefixKey | None] | None = None
    blends: Sequence[Blend | None] | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        reuse: bool = True,
        plans: Sequence[SequencePlan | None] = (None,),
        group: Hashable = None,
        prefix_keys: Sequence[PrefixKey | None] | None = None,
        blends: Sequence[Blend | None] | None = None,
    ) -> PrefillPart:
        """Return the part of these sequences. Raises TypeError if a token id is no integer."""
        offsets = [0, *accumulate(map(len, sequences))]
        # NumPy alone would cut fractions off.
        ids = np.fromiter(map(operator.index, chain.from_iterable(sequences)), np.int64, offsets[-1])
        pairs = sequences if any(isinstance(sequence, PairTokens) for sequence in sequences) else None
        return cls(ids, offsets, reuse, plans, group, pairs, prefix_keys, blends)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.offsets) - 1

    def part(self, first: int, stop: int) -> PrefillPart:
        """Return the sequences from `first` to `stop`. The token ids are not copied."""
        part = slice(first, stop)
        return PrefillPart(
            self.ids,
            self.offsets[first : stop + 1],
            self.reuse,
            self.plans if len(self.plans) == 1 else self.plans[part],
            self.group,
            self.pairs and self.pairs[part],
            self.prefix_keys and self.prefix_keys[part],
            self.blends and self.blends[part],
        )

    def select(self, indices: Sequence[int]) -> PrefillPart:
        """Return some of the sequences, in order."""
        requests = [self.request(index) for index in indices]
        return PrefillBatch.of(requests).parts[0] if requests else self.part(0, 0)

    def request(self, index: int) -> PrefillRequest:
        """Return one sequence."""
        first, stop = self.offsets[index], self.offsets[index + 1]
        return PrefillRequest(
            self.pairs[index] if self.pairs else self.ids[first:stop].tolist(),
            self.reuse,
            self.plans[0 if len(self.plans) == 1 else index],
            self.prefix_keys[index] if self.prefix_keys else None,
            self.group,
            self.blends[index] if self.blends else None,
        )

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return self.offsets[-1] - self.offsets[0]

    @property
    def token_ids(self) -> np.ndarray:
        """The token ids of the sequences, int64 [tokens]."""
        return self.ids[self.offsets[0] : self.offsets[-1]]

    @property
    def reads_more(self) -> bool:
        """Whether more than the output of a sequence is read."""
        return any(plan is not None and (plan.states or plan.targets) for plan in self.plans)


class PrefillBatch(Sequence[PrefillRequest]):
    """Sequences that are computed together, as parts. Read as a sequence, the batch makes PrefillRequests."""

    def __init__(self, parts: Sequence[PrefillPart]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, requests: Sequence[PrefillRequest]) -> PrefillBatch:
        """Return the batch of these requests."""
        if isinstance(requests, PrefillBatch):
            return requests
        parts = []
        for (reuse, group), alike in groupby(requests, lambda request: (request.reuse, request.group)):
            stretch = list(alike)
            part = PrefillPart.of(
                [request.ids for request in stretch],
                reuse,
                [request.sequence_plan for request in stretch],
                group,
                [request.prefix_key for request in stretch],
            )
            if any(request.blend for request in stretch):
                part.blends = [request.blend for request in stretch]
            parts.append(part)
        return cls(parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @overload
    def __getitem__(self, index: int) -> PrefillRequest: ...

    @overload
    def __getitem__(self, index: slice) -> list[PrefillRequest]: ...

    def __getitem__(self, index: int | slice) -> PrefillRequest | list[PrefillRequest]:
        if isinstance(index, slice):
            return list(self)[index]
        index = range(len(self))[index]
        for part in self.parts:
            if index < len(part):
                return part.request(index)
            index -= len(part)
        raise AssertionError("the index is in range")

    def __iter__(self) -> Iterator[PrefillRequest]:
        return (part.request(index) for part in self.parts for index in range(len(part)))

    @cached_property
    def ids(self) -> np.ndarray:
        """The token ids of all sequences, int64 [tokens]."""
        found = [part.token_ids for part in self.parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Index of the first token of each sequence, and their end, int64 [sequences + 1]."""
        offsets, end = [0], 0
        for part in self.parts:
            shift = end - part.offsets[0]
            offsets += [offset + shift for offset in part.offsets[1:]] if shift else part.offsets[1:]
            end = offsets[-1]
        return np.array(offsets)

    @property
    def types(self) -> np.ndarray | None:
        """The types of all tokens, int64 [tokens]; None if every token has type 0."""
        if not any(part.pairs for part in self.parts):
            return None
        return packed_types([request.ids for request in self])

    @property
    def takes_maps(self) -> np.ndarray:
        """Whether each sequence may take attention maps from records, bool [sequences]."""
        allowed = np.repeat([part.reuse for part in self.parts], [len(part) for part in self.parts])
        if any(part.pairs for part in self.parts):
            allowed &= [not isinstance(request.ids, PairTokens) for request in self]
        return allowed

    def prompt_tokens(self, default: int) -> np.ndarray:
        """Return the prompt tokens at the front of each sequence, int64 [sequences].

        default: of the sequences without a plan.
        """
        counts: list[int] = []
        for part in self.parts:
            of_part = [default if plan is None else plan.prompt_tokens for plan in part.plans]
            counts += of_part * len(part) if len(of_part) == 1 else of_part
        return np.array(counts)
