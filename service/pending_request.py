"""One request on its way through the batcher, and the result that its client waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from attncache_core import Outcome
from attncache_core.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What the engine computed for one request, in the order of the request's texts and sequence plans."""

    outputs: np.ndarray  # float32 [sequences, dimensions]
    outcomes: tuple[Outcome, ...]
    log_probabilities: tuple[np.ndarray, ...] = ()  # per sequence float32 [targets]; empty without targets

    @property
    def hits(self) -> int:
        """The number of sequences that took maps from a record of any kind."""
        return sum(outcome.is_hit for outcome in self.outcomes)

    @property
    def prototype_hits(self) -> int:
        """The number of sequences that took maps from a prototype."""
        return self.outcomes.count(Outcome.PROTOTYPE_HIT)

    @classmethod
    def joined(cls, parts: Sequence[RequestResult]) -> RequestResult:
        """Return the result of a request from the results of its parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.outputs for part in parts]),
            tuple(outcome for part in parts for outcome in part.outcomes),
            tuple(own for part in parts for own in part.log_probabilities),
        )


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request between `Batcher.submit` and its result.

    If the future is done before the result is complete, the client has gone and the rest is not computed.
    """

    texts: list[str]
    prompt: Prompt
    truncate: bool
    reuse: bool
    counted: bool  # whether the metric of outcomes counts the sequences
    future: asyncio.Future[RequestResult]
    sequences: list[list[int]] = field(default_factory=list)
    queued_at: float = 0.0  # seconds, perf_counter
    taken: int = 0  # sequences[:taken] were taken into batches
    parts: list[RequestResult] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of sequences that the texts become."""
        return len(self.texts) * len(self.prompt.sequence_plans)


class Share(NamedTuple):
    """The part of a batch that holds sequences[start:stop] of a request."""

    request: PendingRequest
    start: int
    stop: int
