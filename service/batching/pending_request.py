"""One request on its way through the batcher, and the result that its client waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from attncache_core import Outcome, PrefillEngine
from attncache_core.reuse.kv.memory import Wanted
from attncache_core.text.prefix_tree import added_tokens
from attncache_core.text.prompts import Prompt
from service.batching.sources import Source


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What the engine computed for one request, in the order of the request's texts and sequence plans."""

    outputs: np.ndarray  # float32 [sequences, dimensions]
    outcomes: tuple[Outcome, ...]
    log_probabilities: tuple[np.ndarray, ...] = ()  # per sequence float32 [targets]; empty without targets
    asked_tokens: int = 0  # tokens of all sequences
    cached_tokens: int = 0  # tokens of them whose keys and values were stored

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
            sum(part.asked_tokens for part in parts),
            sum(part.cached_tokens for part in parts),
        )


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request between `Batcher.submit` and its result.

    If the future is done before the result is complete, the client has gone and the rest is not computed.
    """

    source: Source
    prompt: Prompt
    reuse: bool
    counted: bool  # whether the metric of outcomes counts the sequences
    future: asyncio.Future[RequestResult]
    # Whether the engine computes the sequences as trees of shared prefixes.
    shares_prefixes: bool = False
    # Sequences of one salt share stored keys and values; None: nothing is given, and nothing is stored.
    salt: bytes | None = None
    sequences: list[list[int]] = field(default_factory=list)
    wanted: list[Wanted | None] = field(default_factory=list)  # how each sequence is looked up
    stored_tokens: list[int] = field(default_factory=list)  # of each sequence, when it was tokenised
    # For each sequence the tokens that it adds to a batch that holds the sequence before it.
    added_tokens: list[int] = field(default_factory=list)
    queued_at: float = 0.0  # seconds, perf_counter
    taken: int = 0  # sequences[:taken] were taken into batches
    # The results of the parts that are computed, by their first sequence; several threads may compute parts.
    parts: dict[int, RequestResult] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of sequences that the texts become."""
        return self.source.count * len(self.prompt.sequence_plans)

    def tokenize(self, engine: PrefillEngine, most_tokens: int) -> None:
        """Make the token sequences of the texts, and count the tokens that each of them adds to a batch.

        Raises InputTooLong, as Source.tokenize.
        """
        sequences, salt, passing = self.source.tokenize(engine, self.prompt, self.salt, most_tokens)
        self.sequences = sequences
        self.wanted = [
            engine.wanted(ids, self.prompt.sequence_plan(index), salt, passing=passing)
            for index, ids in enumerate(sequences)
        ]
        self.stored_tokens = list(map(engine.stored_tokens, self.wanted))
        lengths = [len(ids) - stored for ids, stored in zip(sequences, self.stored_tokens, strict=True)]
        added = added_tokens(sequences) if self.shares_prefixes else lengths
        self.added_tokens = list(map(min, added, lengths))

    def add_part(self, start: int, part: RequestResult) -> RequestResult | None:
        """Keep the result of sequences[start:...]. Returns the whole result once it is complete, else None.

        One thread at a time may call this method.
        """
        self.parts[start] = part
        if sum(len(own.outcomes) for own in self.parts.values()) < len(self.sequences):
            return None
        return RequestResult.joined([self.parts[first] for first in sorted(self.parts)])

    def fitting(self, tokens: int, texts: int, begun_within: int | None = None) -> Fitting:
        """Return the waiting sequences that fit into `tokens` tokens and are of at most `texts` texts.

        Tokens that the sequences share count once. Without shared prefixes, each sequence counts as a text.
        begun_within: begin no text whose first sequence does not fit into this number of tokens.
        """
        fitting = Fitting(self.taken, 0, 0)
        for index in range(self.taken, len(self.sequences)):
            following = self._with(fitting, index)
            if following.tokens > tokens or following.texts > texts:
                break
            begins_text = following.texts > fitting.texts
            if begun_within is not None and begins_text and following.tokens > begun_within:
                break
            fitting = following
        return fitting

    def first_waiting(self) -> Fitting:
        """Return the first waiting sequence alone."""
        return self._with(Fitting(self.taken, 0, 0), self.taken)

    def _with(self, before: Fitting, index: int) -> Fitting:
        """Return `before` with sequence `index` added, which follows the sequences of `before`."""
        is_first = index == self.taken
        begins_text = not self.shares_prefixes or index % len(self.prompt.sequence_plans) == 0
        tokens = self.added_tokens[index]
        if is_first:
            tokens = len(self.sequences[index]) - self.stored_tokens[index]
        return Fitting(index + 1, before.tokens + tokens, before.texts + (is_first or begins_text))


class Fitting(NamedTuple):
    """Waiting sequences of a request that a batch has room for."""

    stop: int  # index of the first sequence that does not fit
    tokens: int  # that the sequences make in one batch
    texts: int  # that the sequences belong to


class Share(NamedTuple):
    """The part of a batch that holds sequences[start:stop] of a request."""

    request: PendingRequest
    start: int
    stop: int
