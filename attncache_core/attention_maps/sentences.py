"""The sentences of a database while it is built: distinct token sequences, some held out to measure on."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from attncache_core.errors import BuildFailed
from attncache_core.models import PackedModel
from attncache_core.tokens import pack

_HELD_OUT_SHARE = 0.1
_MOST_HELD_OUT = 1000


@dataclass(frozen=True)
class Sentences:
    """Distinct token sequences. Those of one length, in this order, become the records of a segment."""

    sequences: list[list[int]]
    held_out: np.ndarray  # bool [sequences]

    def by_length(self) -> dict[int, list[int]]:
        """Length in tokens -> indices of its sequences, those held out last; lengths rising."""
        indices = defaultdict(list)
        for index in np.argsort(self.held_out, kind="stable").tolist():
            indices[len(self.sequences[index])].append(index)
        return dict(sorted(indices.items()))

    def cut_to(self, length: int, most: int) -> list[list[int]]:
        """At most `most` longer sequences, not held out, cut to `length` tokens: the next longer ones first.

        The last token stays, which in most models is a special one.
        """
        by_length = self._training_by_length
        first = bisect_right(by_length, length, key=len)
        nearest = by_length[first : first + most]
        return [list(ids) for ids in dict.fromkeys((*ids[: length - 1], ids[-1]) for ids in nearest)]

    @cached_property
    def _training_by_length(self) -> list[list[int]]:
        trained = zip(self.sequences, self.held_out.tolist(), strict=True)
        return sorted((ids for ids, held_out in trained if not held_out), key=len)

    def rows(self, indices: Sequence[int], *, held_out: bool) -> list[int]:
        """Places within a length's `indices` (their record numbers) of those held out, or of the others."""
        return np.flatnonzero(self.held_out[list(indices)] == held_out).tolist()

    def of_side(self, *, held_out: bool) -> list[list[int]]:
        """The sequences that are held out, or the others."""
        return [
            ids for ids, own in zip(self.sequences, self.held_out.tolist(), strict=True) if own == held_out
        ]

    def inputs(self, model: PackedModel, indices: Sequence[int]) -> torch.Tensor:
        """What the projector reads of sequences of one length, float32 [n, L, hidden]."""
        return first_inputs(model, [self.sequences[index] for index in indices])


def first_inputs(model: PackedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """What the projector reads of sequences of one length, float32 [n, L, hidden]."""
    with torch.inference_mode():
        hidden = model.search_input(model.embed(pack(sequences)))
    require_finite([hidden], len(sequences[0]))
    return hidden.cpu().float().view(len(sequences), -1, model.hidden_size).clone()


def require_finite(computed: Sequence[torch.Tensor], length: int) -> None:
    """Raise BuildFailed if what the model computed for texts of `length` tokens is not finite."""
    if not all(x.isfinite().all() for x in computed):
        raise BuildFailed(
            f"the model computes NaN or infinity for a text of {length} tokens in the corpus; leave it out, "
            "or check the model's weights",
            field="corpus",
        )


def split(
    tokenized: Sequence[Sequence[int]], sources: Sequence[str], max_length: int, random: np.random.Generator
) -> Sentences:
    """The distinct sequences of at most `max_length` tokens, about a tenth held out by whole sources.

    A source is what must not stand on both sides: a template, a document, or the sentence itself. Raises
    BuildFailed if fewer than two sequences are left.
    """
    source_of: dict[tuple[int, ...], str] = {}
    for ids, source in zip(tokenized, sources, strict=True):
        if len(ids) <= max_length:
            source_of.setdefault(tuple(ids), source)
    if len(source_of) < 2:
        raise BuildFailed(
            f"the corpus has {len(source_of)} distinct texts of at most {max_length} tokens; a database "
            "needs two at the least, and thousands to be of use",
            field="corpus",
        )
    wanted = min(_MOST_HELD_OUT, int(len(source_of) * _HELD_OUT_SHARE))
    sizes = Counter(source_of.values())
    held_out: set[str] = set()
    names = sorted(sizes)
    for place in random.permutation(len(names)):
        source = names[place]
        if sizes[source] <= wanted:
            held_out.add(source)
            wanted -= sizes[source]
    return Sentences(
        [list(ids) for ids in source_of], np.array([source in held_out for source in source_of.values()])
    )
