"""One request on its way through the batcher.

PendingRequest -> next_part, part by part -> slices, of which batches take what fits, in order
               <- results of the slices, or of single sequences from other requests (see results.py)
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, repeat
from typing import NamedTuple

from attncache_core import PrefillEngine, PrefillResult
from attncache_core.engine.request import PrefillPart
from attncache_core.engine.result import joined
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.text.limits import require_some_tokens
from attncache_core.text.pairs import truncated_sequences
from attncache_core.text.prefix_tree import added_tokens
from attncache_core.text.prompts import Prompt
from service.batching.results import sequence_names
from service.batching.sources import Source, Tokenized
from service.observability.finished import Timing

# Numbers in the states of the tokens of a request. Its response has some 12 bytes per number.
_MAX_STATES = 2**23


class Fitting(NamedTuple):
    """The first sequences of a slice, as many as a batch has room for."""

    sequences: int
    tokens: int  # that a batch computes of them
    texts: int  # that they belong to


@dataclass(slots=True, eq=False)
class Slice:
    """Neighbouring sequences of one request, which wait for a batch or are in one.

    Tokens that a sequence shares with the sequence before it count once.
    """

    request: PendingRequest
    prefill: PrefillPart
    places: Sequence[int]  # of each sequence, among the sequences of its request
    # [sequences + 1], tokens that the sequences before it add to a batch, counted from anywhere
    costs: Sequence[int]
    # The number of each sequence's text, counted from anywhere; without shared prefixes, each is a text.
    texts: Sequence[int]
    whole: Sequence[int] | None = None  # tokens of each sequence if it is the first; None: as `costs` says
    names: Sequence[bytes] | None = None  # of the results; None: no other request may wait for them

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.places)

    @property
    def tokens(self) -> int:
        """The tokens that count as waiting while the sequences wait."""
        return self.costs[-1] - self.costs[0]

    @property
    def stored_as(self) -> Iterator[PrefixKey]:
        """How the keys and values are looked up that a batch will use."""
        blends = self.prefill.blends or [None] * len(self)
        for key, blend in zip(self.prefill.prefix_keys or [None] * len(self), blends, strict=True):
            if blend is not None:
                yield from (chunk.prefix_key for chunk in blend.chunks)
            elif key is not None:
                yield key

    def fitting(self, tokens: float, texts: float, begun_within: float | None = None) -> Fitting:
        """Return the first sequences that fit into `tokens` tokens and are of at most `texts` texts.

        begun_within: begin no text whose first sequence does not fit into this number of tokens.
        """
        # What the first sequence shares with the sequence before it counts here.
        before = self.costs[1] - self._cost_of_first
        count = bisect_right(self.costs, before + tokens, 1) - 1
        count = min(count, bisect_left(self.texts, self.texts[0] + texts))
        if begun_within is not None:
            too_long = bisect_right(self.costs, before + begun_within, 1) - 1
            if 0 < too_long < count and self.texts[too_long] == self.texts[too_long - 1]:
                # The text has begun, and the next one begins behind it.
                too_long = bisect_right(self.texts, self.texts[too_long])
            count = min(count, too_long)
        return self.first(count)

    def first(self, count: int) -> Fitting:
        """Return the first `count` sequences."""
        if not count:
            return Fitting(0, 0, 0)
        tokens = self.costs[count] - self.costs[1] + self._cost_of_first
        return Fitting(count, tokens, self.texts[count - 1] - self.texts[0] + 1)

    def behind(self, batch: Batch) -> Slice:
        """Return the slice with what its sequences add to a batch.

        If the batch ends with the sequence before the slice, the batch computes their common prefix once.
        """
        if self.whole is None or not batch:
            return self
        last = batch[-1]
        follows = last.request is self.request and last.places[-1] + 1 == self.places[0]
        return replace(self, whole=None) if follows else self

    def shared(self, index: int) -> int:
        """Return how many tokens a sequence shares with the sequence before it."""
        return self.whole[index] - (self.costs[index + 1] - self.costs[index]) if self.whole else 0

    def part(self, first: int, stop: int) -> Slice:
        """Return the sequences from `first` to `stop`."""
        part = slice(first, stop)
        return Slice(
            self.request,
            self.prefill.part(first, stop),
            self.places[part],
            self.costs[first : stop + 1],
            self.texts[part],
            self.whole and self.whole[part],
            self.names and self.names[part],
        )

    def select(self, indices: Sequence[int]) -> Slice:
        """Return some of the sequences, in order. What follows a sequence that is left out shares nothing."""
        costs, texts, before = [0], list[int](), -1
        for index in indices:
            follows = index == before + 1
            same = before >= 0 and self.texts[index] == self.texts[before]
            shared = self.costs[index + 1] - self.costs[index]
            costs.append(costs[-1] + (shared if follows or self.whole is None else self.whole[index]))
            texts.append(texts[-1] + (not same) if texts else 0)
            before = index
        return Slice(
            self.request,
            self.prefill.select(indices),
            [self.places[index] for index in indices],
            costs,
            texts,
            self.whole and [self.whole[index] for index in indices],
            self.names and [self.names[index] for index in indices],
        )

    @property
    def _cost_of_first(self) -> int:
        return self.whole[0] if self.whole else self.costs[1] - self.costs[0]


Batch = list[Slice]


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request between `Batcher.submit` and its result.

    If the future is done before the result is complete, the client has gone and the rest is not computed.
    """

    source: Source
    prompt: Prompt
    reuse: bool
    counted: bool  # whether the metrics of outcomes and of repeated sequences count the sequences
    future: asyncio.Future[PrefillResult]
    flow: Sequence[Hashable] = ()
    # Whether the engine computes the sequences as trees of shared prefixes.
    shares_prefixes: bool = False
    # Sequences of one salt share stored keys and values; None: nothing is given, and nothing is stored.
    salt: bytes | None = None
    may_blend: bool = False  # whether the quality of blended chunks was measured for this prompt
    # Separates the names of its results from other clients' names; None: no result is shared.
    names_salt: bytes | None = None
    timing: Timing = field(default_factory=Timing)
    # Gets `parts` once the request is answered; None: they are not kept.
    answered: Callable[[Sequence[PrefillPart]], None] | None = None
    parts: list[PrefillPart] = field(default_factory=list)  # all sequences that were tokenised
    digest: bytes | None = None  # names the result for equal requests; None: it is not kept for them
    longest: float = math.inf  # tokens of a sequence, which is cut beyond
    seconds: float = math.inf  # that it may take from `timing.queued_at` on
    guess: int = 0  # about how many tokens it adds to batches, before its texts are tokenised
    queued: bool = False  # whether it is in the queue
    waiting: deque[Slice] = field(default_factory=deque)  # sequences that this request computes
    tokenized: int = 0  # sequences that the source has yielded
    tokens: int = 0  # of these; `timing` may count other requests of its client too
    truncated: int = 0  # of these, the ones whose texts were too long and were cut
    guessed_each: float = 0.0  # tokens of each sequence that is not tokenised yet
    waiting_sequences: int = 0  # that wait for a batch, tokenised or not
    waiting_tokens: int = 0  # of the sequences that wait; of texts that are not tokenised yet, a guess
    _parts: Iterator[Tokenized] | None = None
    _last_ids: Sequence[int] | None = None  # of the sequence that the source has yielded last
    # Results, and the places of the sequences of each; several threads may add results.
    _results: list[PrefillResult] = field(default_factory=list)
    _places: list[Sequence[int]] = field(default_factory=list)
    _added: int = 0  # sequences with a result
    _adding: threading.Lock = field(default_factory=threading.Lock)
    count: int = field(init=False)  # sequences that the texts become

    def __post_init__(self) -> None:
        self.count = self.source.count * len(self.prompt.sequence_plans)

    @property
    def deadline(self) -> float:
        """When the request must be answered, in seconds of `time.perf_counter`."""
        return self.timing.queued_at + self.seconds

    @property
    def is_tokenized(self) -> bool:
        """Whether all texts are token sequences."""
        return self.tokenized == self.count

    def guess_tokens(self, characters_per_token: float) -> None:
        """Guess how many tokens each of the sequences adds to a batch, before the texts are tokenised."""
        repeated = 1 if self.shares_prefixes else len(self.prompt.sequence_plans)
        each = self.source.characters * repeated / characters_per_token / self.count
        self.guessed_each = min(each, self.longest)
        self.guess = self.guessed_tokens

    @property
    def guessed_tokens(self) -> int:
        """About how many tokens the sequences have that are not tokenised yet."""
        return round(self.guessed_each * (self.count - self.tokenized))

    def next_part(self, engine: PrefillEngine, max_total_tokens: int) -> Slice:
        """Tokenise the next part of the texts. Returns its sequences, which the caller lets wait.

        Raises InputTooLong, as Source.tokenize. One thread at a time may call this method.
        """
        if self._parts is None:
            if self.prompt.sequence_plans[0].states:
                max_total_tokens = min(max_total_tokens, _MAX_STATES // engine.model.hidden_size)
            self._parts = self.source.tokenize(engine, self.prompt, self.salt, max_total_tokens)
        part = next(self._parts)
        plans = self.prompt.sequence_plans
        self.truncated += truncated_sequences(part.sequences)
        engine.require_known(part.sequences, self.tokenized, len(plans))
        part = part._replace(sequences=engine.without_padding(part.sequences, self.tokenized))
        sequences = part.sequences
        places = range(self.tokenized, self.tokenized + len(sequences))
        # A request without reuse shares its prefixes with itself only: the labels of a text.
        group = id(self) if self.salt is None else self.salt
        of_each = plans if len(plans) == 1 else plans * (len(places) // len(plans))
        made = PrefillPart.of(sequences, self.reuse, of_each, group)
        self.tokens += made.offsets[-1]
        self.timing.tokens += made.offsets[-1]
        if self.answered is not None:
            self.parts.append(made)
        require_some_tokens(sequences, self.tokenized, len(plans))
        piece = Slice(self, made, places, made.offsets, places)
        if self.shares_prefixes or part.salt is not None:
            self._count_given(engine, part, piece)
        # Another salt than the request's own says that keys and values were truncated, which approximates.
        if self.names_salt is not None and part.salt == self.salt:
            piece.names = sequence_names(self.names_salt, plans, made, places)
        self.tokenized = places.stop
        return piece

    def add(self, result: PrefillResult, places: Sequence[int]) -> PrefillResult | None:
        """Keep the result of the sequences at these places. Returns the whole result once it is complete."""
        with self._adding:
            self._results.append(result)
            self._places.append(places)
            self._added += len(places)
            if self._added < self.count:
                return None
        self.timing.computed_at = time.perf_counter()
        # A sequence that waited for another request in vain is computed behind later sequences.
        is_whole = len(self._results) == 1 and list(places) == list(range(self.count))
        whole = result if is_whole else joined(self._results, self._places)
        return replace(whole, truncated=self.truncated) if self.truncated else whole

    def _count_given(self, engine: PrefillEngine, part: Tokenized, piece: Slice) -> None:
        """Note how keys and values are looked up. Count what is stored, or shared with a sequence before."""
        sequences, plans, salt = part.sequences, self.prompt.sequence_plans, part.salt
        whole = added = list(map(len, sequences))
        if salt is not None:
            keys = [
                engine.prefix_key(ids, plan, salt, passing=part.passing)
                for ids, plan in zip(sequences, cycle(plans), strict=False)
            ]
            whole = [length - engine.stored_tokens(key) for length, key in zip(whole, keys, strict=True)]
            piece.prefill.prefix_keys = keys
            if part.chunked is not None and self.may_blend:
                chunked = [part.chunked[index // len(plans)] for index in range(len(sequences))]
                blends = list(map(engine.blending.blend, chunked, sequences, repeat(salt)))
                piece.prefill.blends = blends if any(blends) else None
                whole = [
                    blend.tokens if blend else tokens for blend, tokens in zip(blends, whole, strict=True)
                ]
        if self.shares_prefixes:
            before = [] if self._last_ids is None else [self._last_ids]
            added = added_tokens([*before, *sequences])[len(before) :]
            piece.whole, piece.texts = whole, [place // len(plans) for place in piece.places]
            self._last_ids = sequences[-1]
        piece.costs = [0, *accumulate(map(min, added, whole))]
        if self.shares_prefixes and len(plans) == 1 and len(piece) > 1:
            # What the texts share is known from the first ones.
            self.guessed_each = (piece.costs[-1] - piece.costs[1]) / (len(piece) - 1)
