"""The token sequences of a corpus, and the input of the first layer's attention for each of them.

    corpus -> split -> Sentences: distinct token sequences to train on, and held-out ones to measure on

Damage, clusters, training pairs, features and probes all need the first layer's inputs. FirstInputs computes
each input once, and keeps it in the model's dtype in a temporary file in the folder of the build. The file
disappears when the process ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch

from attncache_core.errors import BuildFailed
from attncache_core.models import PackedModel
from attncache_core.text.token_batch import pack

_HELD_OUT_SHARE = 0.1
_MAX_HELD_OUT = 1000
_SEQUENCES_PER_PASS = 256


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
        return sorted(self.of_side(held_out=False), key=len)

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


class FirstInputs:
    """The inputs of the first layer's attention, by token sequence."""

    def __init__(self, model: PackedModel, folder: Path) -> None:
        """folder: where the temporary file is created. Its size is tokens * hidden size * 2 or 4 bytes."""
        self._model = model
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as this object
        self._offsets: dict[tuple[int, ...], int] = {}  # in bytes
        self._dtype = torch.float32

    def close(self) -> None:
        """Remove the temporary file; nothing can be asked for afterwards."""
        self._file.close()

    def of(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the inputs of sequences of one length, float32 [n, L, hidden].

        Missing inputs are computed first. `sequences` may be empty. Raises BuildFailed if the model computes
        NaN or infinity.
        """
        if not sequences:
            return torch.empty(0, 1, self._model.hidden_size, dtype=torch.float32)
        keys = [tuple(ids) for ids in sequences]
        missing = [ids for ids in dict.fromkeys(keys) if ids not in self._offsets]
        for at in range(0, len(missing), _SEQUENCES_PER_PASS):
            self._compute(missing[at : at + _SEQUENCES_PER_PASS])
        content = np.memmap(self._file, dtype=np.uint8, mode="r")
        size = len(keys[0]) * self._model.hidden_size * self._dtype.itemsize
        rows = np.stack([content[start : start + size] for start in map(self._offsets.__getitem__, keys)])
        inputs = torch.from_numpy(rows).view(self._dtype).float()
        return inputs.view(len(keys), len(keys[0]), self._model.hidden_size)

    @torch.inference_mode()
    def _compute(self, sequences: Sequence[tuple[int, ...]]) -> None:
        hidden = self._model.search_input(self._model.embed(pack(sequences))).cpu()
        require_finite([hidden], len(sequences[0]))
        self._dtype = hidden.dtype
        content = hidden.contiguous().view(len(sequences), -1).view(torch.uint8).numpy()
        start = self._file.seek(0, 2)
        self._file.write(content.tobytes())
        self._file.flush()
        for row, ids in enumerate(sequences):
            self._offsets[ids] = start + row * content.shape[1]


def require_finite(computed: Sequence[torch.Tensor], length: int) -> None:
    """Raise BuildFailed if a tensor that the model computed for texts of `length` tokens is not finite."""
    if not all(x.isfinite().all() for x in computed):
        raise BuildFailed(
            f"the model computes NaN or infinity for a text of {length} tokens in the corpus; remove the "
            "text, or check the model's weights",
            field="corpus",
        )
