"""One request on its way through the batcher.

PendingRequest -> next_part, part by part -> PendingSequences, of which batches take slices in order
               <- results of the slices, or of single sequences from other requests (see results.py)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attncache_core import InvalidInput, PrefillEngine, PrefillRequest
from attncache_core.reuse.blend.chunks import Blend
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.text.pairs import token_types
from attncache_core.text.prefix_tree import added_tokens
from attncache_core.text.prompts import Prompt
from service.batching.results import RequestResult, SequenceNames, joined
from service.batching.sources import Source, Tokenized
from service.observability.finished import Timing


class PendingSequence(NamedTuple):
    """A sequence that waits for a batch."""

    request: PendingRequest
    place: int  # among the sequences of its request
    prefill: PrefillRequest
    tokens: int  # that a batch computes
    added: int  # that it adds to a batch which holds the sequence of its request before it
    name: bytes | None  # of its result, if others may wait for the result

    @property
    def stored_as(self) -> list[PrefixKey]:
        """How the keys and values are looked up that a batch will use."""
        if self.prefill.blend is not None:
            return [chunk.prefix_key for chunk in self.prefill.blend.chunks]
        return [] if self.prefill.prefix_key is None else [self.prefill.prefix_key]


class Slice(NamedTuple):
    """The sequences of one request in a batch."""

    request: PendingRequest
    sequences: list[PendingSequence]


Batch = list[Slice]


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
    flow: Sequence[Hashable] = ()
    # Whether the engine computes the sequences as trees of shared prefixes.
    shares_prefixes: bool = False
    # Sequences of one salt share stored keys and values; None: nothing is given, and nothing is stored.
    salt: bytes | None = None
    may_blend: bool = False  # whether the quality of blended chunks was measured for this prompt
    names: SequenceNames | None = None  # None: results are computed for this request alone
    timing: Timing = field(default_factory=Timing)
    queued: bool = False  # whether it is in the queue
    sequences: list[PendingSequence] = field(default_factory=list)  # that this request computes
    taken: int = 0  # sequences[:taken] were taken into batches
    tokenized: int = 0  # sequences that the source has yielded
    guessed_each: float = 0.0  # tokens of each sequence that is not tokenised yet
    waiting_sequences: int = 0  # that wait for a batch, tokenised or not
    waiting_tokens: int = 0  # of the sequences that wait; of texts that are not tokenised yet, a guess
    _parts: Iterator[Tokenized] | None = None
    _last_ids: Sequence[int] | None = None  # of the sequence that the source has yielded last
    # Results with the places of their sequences; several threads may add results.
    _results: list[tuple[Sequence[int], RequestResult]] = field(default_factory=list)
    _added: int = 0  # sequences with a result
    _adding: threading.Lock = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        """The number of sequences that the texts become."""
        return self.source.count * len(self.prompt.sequence_plans)

    @property
    def is_tokenized(self) -> bool:
        """Whether all texts are token sequences."""
        return self.tokenized == self.count

    @property
    def waits(self) -> bool:
        """Whether a sequence waits for a batch."""
        return self.taken < len(self.sequences)

    def guess_tokens(self, characters_per_token: float) -> None:
        """Guess how many tokens each of the sequences adds to a batch, before the texts are tokenised."""
        repeated = 1 if self.shares_prefixes else len(self.prompt.sequence_plans)
        self.guessed_each = self.source.characters * repeated / characters_per_token / self.count

    @property
    def guessed_tokens(self) -> int:
        """About how many tokens the sequences have that are not tokenised yet."""
        return round(self.guessed_each * (self.count - self.tokenized))

    def next_part(self, engine: PrefillEngine, max_total_tokens: int) -> list[PendingSequence]:
        """Tokenise the next part of the texts. Returns its sequences, which the caller adds.

        Raises InputTooLong, as Source.tokenize. One thread at a time may call this method.
        """
        if self._parts is None:
            self._parts = self.source.tokenize(engine, self.prompt, self.salt, max_total_tokens)
        part = next(self._parts)
        first, sequences = self.tokenized, part.sequences
        self.timing.tokens += sum(map(len, sequences))
        for index, ids in enumerate(sequences, first):
            if not ids:
                text = f"inputs[{index // len(self.prompt.sequence_plans)}]"
                raise InvalidInput(f"{text} has no token that the model knows; change this text", field=text)
        added = list(map(len, sequences))
        if self.shares_prefixes:
            before = [] if self._last_ids is None else [self._last_ids]
            added = added_tokens([*before, *sequences])[len(before) :]
        made = []
        for index, ids, own in zip(range(first, first + len(sequences)), sequences, added, strict=True):
            plan = self.prompt.sequence_plan(index)
            prefix_key = engine.prefix_key(ids, plan, part.salt, passing=part.passing)
            blend = self._blend(engine, part, ids, index - first)
            # A request without reuse shares its prefixes with itself only: the labels of a text.
            group = id(self) if self.salt is None else self.salt
            prefill = PrefillRequest(ids, self.reuse, plan, prefix_key, group, blend)
            tokens = blend.tokens if blend else len(ids) - engine.stored_tokens(prefix_key)
            name = self._name(ids, index, part.salt)
            made.append(PendingSequence(self, index, prefill, tokens, min(own, tokens), name))
        self._last_ids = sequences[-1]
        self.tokenized += len(sequences)
        return made

    def add(self, result: RequestResult, places: Sequence[int]) -> RequestResult | None:
        """Keep the result of the sequences at these places. Returns the whole result once it is complete."""
        with self._adding:
            self._results.append((places, result))
            self._added += len(places)
            if self._added < self.count:
                return None
        self.timing.computed_at = time.perf_counter()
        # A sequence that waited for another request in vain is computed behind later sequences.
        is_whole = len(self._results) == 1 and list(places) == list(range(self.count))
        return result if is_whole else joined(self._results)

    def fitting(self, tokens: int, texts: int, begun_within: int | None = None) -> Fitting:
        """Return the waiting sequences that fit into `tokens` tokens and are of at most `texts` texts.

        Tokens that the sequences share count once. Without shared prefixes, each sequence counts as a text.
        begun_within: begin no text whose first sequence does not fit into this number of tokens.
        """
        fitting = Fitting(self.taken, 0, 0)
        for position in range(self.taken, len(self.sequences)):
            following = self._with(fitting, position)
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

    def _with(self, before: Fitting, position: int) -> Fitting:
        """Return `before` with the sequence at this position added, which follows it."""
        own = self.sequences[position]
        is_first = position == self.taken or self.sequences[position - 1].place != own.place - 1
        begins_text = not self.shares_prefixes or own.place % len(self.prompt.sequence_plans) == 0
        tokens = own.tokens if is_first else own.added
        return Fitting(position + 1, before.tokens + tokens, before.texts + (is_first or begins_text))

    def _blend(self, engine: PrefillEngine, part: Tokenized, ids: Sequence[int], index: int) -> Blend | None:
        """Return how the sequence at `index` of a part is blended; None if it is computed exactly."""
        if part.chunked is None or part.salt is None or not self.may_blend:
            return None
        return engine.blending.blend(part.chunked[index // len(self.prompt.sequence_plans)], ids, part.salt)

    def _name(self, ids: Sequence[int], index: int, salt: bytes | None) -> bytes | None:
        # Another salt than the request's own says that keys and values were truncated, which approximates.
        if self.names is None or salt != self.salt:
            return None
        plans, types = len(self.prompt.sequence_plans), token_types(ids)
        # The types of a pair's tokens are not in its token ids.
        return self.names(ids) if plans == 1 and types is None else self.names(ids, index % plans, types)


class Fitting(NamedTuple):
    """Waiting sequences of a request that a batch has room for."""

    stop: int  # position of the first sequence that does not fit
    tokens: int  # that the sequences make in one batch
    texts: int  # that the sequences belong to
