"""Split a corpus into distinct token sequences to train on and held-out token sequences to measure on."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attncache_core.errors import BuildFailed

_HELD_OUT_SHARE = 0.1
_MAX_HELD_OUT = 1000


@dataclass(frozen=True)
class Sentences:
    """Distinct token sequences, in corpus order, and the mark of the held-out sequences."""

    sequences: list[list[int]]
    held_out: np.ndarray  # bool [sequences]

    def by_length(self) -> dict[int, list[int]]:
        """Return, for each length in tokens, the indices of its sequences.

        Lengths rise. Held-out sequences come last, which is also the order of the records in a segment.
        """
        indices = defaultdict(list)
        for index in np.argsort(self.held_out, kind="stable").tolist():
            indices[len(self.sequences[index])].append(index)
        return dict(sorted(indices.items()))

    def cut_to(self, length: int, max_sequences: int) -> list[list[int]]:
        """Return at most `max_sequences` longer training sequences, cut to `length` tokens.

        The shortest of the longer sequences are taken first. The last token is kept, because it is a special
        token in most models. Equal results count once.
        """
        by_length = self._training_by_length
        first = bisect_right(by_length, length, key=len)
        nearest = by_length[first : first + max_sequences]
        return [list(ids) for ids in dict.fromkeys((*ids[: length - 1], ids[-1]) for ids in nearest)]

    @cached_property
    def _training_by_length(self) -> list[list[int]]:
        trained = zip(self.sequences, self.held_out.tolist(), strict=True)
        return sorted((ids for ids, held_out in trained if not held_out), key=len)

    def rows(self, indices: Sequence[int], *, held_out: bool) -> list[int]:
        """Return the positions in `indices` of the held-out sequences, or of the training sequences.

        indices: all sequences of a length, see by_length. Then the positions are also the record numbers.
        """
        return np.flatnonzero(self.held_out[list(indices)] == held_out).tolist()

    def of_side(self, *, held_out: bool) -> list[list[int]]:
        """Return the held-out sequences, or the training sequences."""
        return [
            ids
            for ids, is_held_out in zip(self.sequences, self.held_out.tolist(), strict=True)
            if is_held_out == held_out
        ]

    def chosen(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the sequences with these indices."""
        return [self.sequences[index] for index in indices]


def split(
    tokenized: Sequence[Sequence[int]], sources: Sequence[str], max_length: int, random: np.random.Generator
) -> Sentences:
    """Return the distinct sequences of at most `max_length` tokens, with about a tenth held out.

    sources: the source of each sequence, such as a template, a document or the sentence itself. Sequences of
    one source are either all held out or all trained on. Raises BuildFailed if fewer than two sequences
    remain, or if no two sequences to train on have the same length.
    """
    source_of: dict[tuple[int, ...], str] = {}
    for ids, source in zip(tokenized, sources, strict=True):
        if len(ids) <= max_length:
            source_of.setdefault(tuple(ids), source)
    if len(source_of) < 2:
        raise BuildFailed(
            f"the corpus has {len(source_of)} distinct texts of at most {max_length} tokens; a database "
            "needs at least two, and thousands to be useful",
            field="corpus",
        )
    needed = min(_MAX_HELD_OUT, int(len(source_of) * _HELD_OUT_SHARE))
    sizes = Counter(source_of.values())
    held_out: set[str] = set()
    names = sorted(sizes)
    for index in random.permutation(len(names)):
        source = names[index]
        if sizes[source] <= needed:
            held_out.add(source)
            needed -= sizes[source]
    trained = Counter(len(ids) for ids, source in source_of.items() if source not in held_out)
    if max(trained.values(), default=0) < 2:
        raise BuildFailed(
            "no two texts of the corpus have the same number of tokens, and the search for similar texts is "
            "trained on such pairs; add texts",
            field="corpus",
        )
    return Sentences(
        [list(ids) for ids in source_of], np.array([source in held_out for source in source_of.values()])
    )
