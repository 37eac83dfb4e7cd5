"""What the engine computed: one row for each sequence, of a batch, of a part of it, or of several batches.

PrefillEngine.run -> PrefillResult of a batch -> rows of one request -> joined with rows of other batches
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from attncache_core.reuse.blend.chunks import BlendReport
from attncache_core.reuse.plan import Outcome


class BatchReport(NamedTuple):
    """What a batch took, and what was noticed on the way. The reports of several batches add up."""

    tokens: int = 0  # that were computed; a shared prefix counts once
    forward_seconds: float = 0.0  # of everything except planning
    attention_seconds: float = 0.0  # of attention, without the output projections; part of forward_seconds
    search_seconds: float = 0.0  # of planning: familiarity, projector, index and checks
    corrupt_records: int = 0  # records that were found damaged and were not used
    # Lengths whose records cannot be used any more, because their file was truncated or cannot be read.
    lost_lengths: tuple[int, ...] = ()


_NO_REPORT = BatchReport()


class Compared(NamedTuple):
    """How the sequences compared with the records of a database."""

    similarities: np.ndarray  # float32 [sequences], nan if the sequence was not compared with records
    # float32 [sequences], nan if the strangeness of the sequence was not computed; see maps/familiarity.py
    strangeness: np.ndarray


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The results of some sequences, in the order of their requests.

    What only some sequences have is a list with one entry per sequence, or None if no sequence has any.
    """

    outputs: np.ndarray  # float32 [sequences, d]: embeddings before normalisation, or class logits
    finite: np.ndarray  # bool [sequences], whether all numbers computed for each sequence are finite
    outcomes: tuple[Outcome, ...]
    asked_tokens: np.ndarray  # int64 [sequences], tokens of each sequence
    cached_tokens: np.ndarray  # int64 [sequences], tokens of each sequence whose keys and values were stored
    report: BatchReport = _NO_REPORT  # of whole batches
    compared: Compared | None = None  # None: nobody looked for records
    log_probabilities: Sequence[np.ndarray] | None = None  # of each sequence's targets, float32 [targets]
    # Of the tokens of each sequence whose plan reads them, float32 [tokens, hidden], else [0, hidden].
    token_states: Sequence[np.ndarray] | None = None
    blends: Sequence[BlendReport | None] | None = None  # what was done with the chunks of each sequence
    repeated: int = 0  # sequences whose results were computed for others, or earlier
    truncated: int = 0  # sequences whose texts were too long and were cut; only of a whole request

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.outcomes)

    @property
    def similarities(self) -> np.ndarray:
        """The similarity of each sequence to its nearest record, as Compared."""
        return self._comparison.similarities

    @property
    def strangeness(self) -> np.ndarray:
        """The strangeness of each sequence, as Compared."""
        return self._comparison.strangeness

    @property
    def all_asked_tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(self.asked_tokens.tolist())

    @property
    def all_cached_tokens(self) -> int:
        """The tokens of all sequences whose keys and values were stored."""
        return sum(self.cached_tokens.tolist())

    @property
    def hits(self) -> int:
        """The number of sequences that took maps from a record of any kind."""
        return self.outcomes.count(Outcome.HIT) + self.prototype_hits

    @property
    def prototype_hits(self) -> int:
        """The number of sequences that took maps from a prototype."""
        return self.outcomes.count(Outcome.PROTOTYPE_HIT)

    @property
    def blended(self) -> list[BlendReport]:
        """What was done with the chunks of the sequences whose chunks were blended."""
        return [report for report in self.blends or () if report is not None]

    def rows(self, first: int, stop: int) -> PrefillResult:
        """Return what a request gets of the sequences from `first` to `stop`. The arrays are views."""
        part = slice(first, stop)
        return PrefillResult(
            self.outputs[part],
            self.finite[part],
            self.outcomes[part],
            self.asked_tokens[part],
            self.cached_tokens[part],
            log_probabilities=self.log_probabilities and self.log_probabilities[part],
            token_states=self.token_states and self.token_states[part],
            blends=self.blends and self.blends[part],
        )

    @property
    def _comparison(self) -> Compared:
        nothing = np.full(len(self), np.nan, np.float32)
        return self.compared or Compared(nothing, nothing)


def joined(parts: Sequence[PrefillResult], places: Sequence[Sequence[int] | np.ndarray]) -> PrefillResult:
    """Return one result of several parts. places: of the sequences of each part, among all sequences."""
    order = np.argsort(np.concatenate(places))

    def rows(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    def entries(name: str, absent: Any = None) -> list[Any] | None:
        columns = [getattr(part, name) for part in parts]
        if not any(columns):
            return None
        whole = list(
            chain.from_iterable(
                column or [absent] * len(part) for column, part in zip(columns, parts, strict=True)
            )
        )
        return [whole[index] for index in order.tolist()]

    return PrefillResult(
        rows("outputs"),
        rows("finite"),
        tuple(entries("outcomes") or ()),
        rows("asked_tokens"),
        rows("cached_tokens"),
        _added([part.report for part in parts]),
        Compared(rows("similarities"), rows("strangeness")) if any(part.compared for part in parts) else None,
        entries("log_probabilities", np.zeros(0, np.float32)),
        entries("token_states", np.zeros((0, 0), np.float32)),
        entries("blends"),
        sum(part.repeated for part in parts),
        sum(part.truncated for part in parts),
    )


def _added(reports: Sequence[BatchReport]) -> BatchReport:
    added = [report for report in reports if report is not _NO_REPORT]
    if not added:
        return _NO_REPORT
    return BatchReport(*(reduce(operator.add, column) for column in zip(*added, strict=True)))
