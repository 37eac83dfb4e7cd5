"""One request on its way through the batcher.

PendingRequest -> the texts that it computes -> next_part, part by part -> slices, of which batches take what
                  fits, in order
               <- results of the slices, and of the other texts (see results.py)
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, repeat
from typing import NamedTuple

from attncache_core import InvalidInput, PrefillEngine
from attncache_core.engine.request import PrefillPart
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.text.limits import too_many
from attncache_core.text.prefix_tree import added_tokens
from attncache_core.text.prompts import Prompt
from service.batching.results import RequestResult, joined
from service.batching.sources import NamedSource, Source, Tokenized, moved
from service.errors import rename
from service.observability.finished import Timing


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
    counted: bool  # whether the metric of outcomes counts the sequences
    future: asyncio.Future[RequestResult]
    flow: Sequence[Hashable] = ()
    # Whether the engine computes the sequences as trees of shared prefixes.
    shares_prefixes: bool = False
    # Sequences of one salt share stored keys and values; None: nothing is given, and nothing is stored.
    salt: bytes | None = None
    may_blend: bool = False  # whether the quality of blended chunks was measured for this prompt
    names: Sequence[bytes] | None = None  # of the texts; None: results are computed for this request alone
    timing: Timing = field(default_factory=Timing)
    # Gets `parts` once the request is answered; None: they are not kept.
    answered: Callable[[Sequence[PrefillPart]], None] | None = None
    parts: list[PrefillPart] = field(default_factory=list)  # all sequences whose token ids are known
    queued: bool = False  # whether it is in the queue
    waiting: deque[Slice] = field(default_factory=deque)  # sequences that this request computes
    characters: int = 0  # of the texts that this request computes
    computed_tokens: int = 0  # of these texts, as far as they are tokenised
    untokenized: int = 0  # sequences of these texts that are not tokenised yet
    guessed_each: float = 0.0  # tokens of each of them
    waiting_sequences: int = 0  # that wait for a batch, tokenised or not
    waiting_tokens: int = 0  # of the sequences that wait; of texts that are not tokenised yet, a guess
    # What is not begun to be tokenised: some texts, and their places among the texts of the request.
    _sources: deque[tuple[Source, Sequence[int]]] = field(default_factory=deque)
    # The source that is tokenised: its parts, the places of its texts, how many of them are token sequences.
    _parts: Iterator[Tokenized] = field(default_factory=lambda: iter(()))
    _texts: Sequence[int] = ()
    _tokenized: int = 0
    _last_ids: Sequence[int] | None = None  # of the sequence that was tokenised last
    # Results with the places of their sequences; several threads may add results.
    _results: list[tuple[Sequence[int], RequestResult]] = field(default_factory=list)
    # The same, of texts of which some sequences are computed; None: not exactly.
    _begun: dict[int, list[tuple[Sequence[int], RequestResult | None]]] = field(default_factory=dict)
    _added: int = 0  # sequences with a result
    _known: bool = False  # whether results of other requests were added
    _adding: threading.Lock = field(default_factory=threading.Lock)

    @property
    def plans(self) -> int:
        """The number of sequences of each text."""
        return len(self.prompt.sequence_plans)

    @property
    def count(self) -> int:
        """The number of sequences that the texts become."""
        return self.source.count * self.plans

    @property
    def guessed_tokens(self) -> int:
        """About how many tokens the sequences have that are not tokenised yet."""
        return round(self.guessed_each * self.untokenized)

    def compute(self, texts: Sequence[int] | None, characters_per_token: float) -> tuple[int, int]:
        """Let the request compute these of its texts; None: all of them.

        Returns the number of their sequences, and a guess of how many tokens these add to a batch.
        """
        source, places = self.source, texts
        if places is None or len(places) == self.source.count:
            places = range(self.source.count)
        else:
            assert isinstance(self.source, NamedSource)  # of another source, no text is known
            source = self.source.select(places)
        self._sources.append((source, places))
        repeated = 1 if self.shares_prefixes else self.plans
        guessed = round(source.characters * repeated / characters_per_token)
        sequences = source.count * self.plans
        self.guessed_each = (self.guessed_tokens + guessed) / (self.untokenized + sequences)
        self.untokenized += sequences
        self.characters += source.characters
        return sequences, guessed

    def next_part(self, engine: PrefillEngine, max_total_tokens: int) -> Slice:
        """Tokenise the next part of the texts. Returns its sequences, which the caller lets wait.

        The caller subtracts them from `untokenized`. Raises InputTooLong, as Source.tokenize, and
        InvalidInput for a text without tokens. One thread at a time may call this method.
        """
        part = self._next(engine, max_total_tokens)
        sequences, plans = part.sequences, self.prompt.sequence_plans
        count = len(sequences) // len(plans)
        places = texts = self._texts[self._tokenized : self._tokenized + count]
        self._tokenized += count
        if len(plans) > 1:
            places = [text * len(plans) + plan for text in texts for plan in range(len(plans))]
        # A request without reuse shares its prefixes with itself only: the labels of a text.
        group = id(self) if self.salt is None else self.salt
        made = PrefillPart.of(sequences, self.reuse, plans if len(plans) == 1 else plans * count, group)
        self._count_tokens(made, max_total_tokens)
        if not all(sequences):
            empty = next(place for place, ids in zip(places, sequences, strict=True) if not ids)
            text = f"inputs[{empty // len(plans)}]"
            raise InvalidInput(f"{text} has no token that the model knows; change this text", field=text)
        piece = Slice(self, made, places, made.offsets, range(len(places)))
        if self.shares_prefixes or part.salt is not None:
            self._count_given(engine, part, piece)
        return piece

    def add(self, result: RequestResult, places: Sequence[int]) -> RequestResult | None:
        """Keep the result of the sequences at these places. Returns the whole result once it is complete."""
        with self._adding:
            if result.repeated:
                self.timing.tokens += result.asked_tokens
                self._known = True
                if self.answered is not None:
                    self.parts += result.parts
            self._results.append((places, result))
            self._added += len(places)
            if self._added < self.count:
                return None
        self.timing.computed_at = time.perf_counter()
        # A text that was expected from another request in vain is computed behind later texts.
        is_whole = len(self._results) == 1 and list(places) == list(range(self.count))
        return result if is_whole else joined(self._results)

    def places_of(self, text: int) -> range:
        """Return the places of a text's sequences."""
        return range(text * self.plans, (text + 1) * self.plans)

    def ended_texts(
        self, piece: Slice, result: RequestResult, exact: Sequence[bool]
    ) -> Iterator[tuple[int, RequestResult | None]]:
        """Yield each text whose last sequences are in a slice, with its result for other requests.

        result: of the slice. exact: of each sequence. A text's result is None if a sequence is not exact.
        """
        plans, sampled, stop = self.plans, self.answered is not None, 0
        while stop < len(piece):
            first = stop
            text, plan = divmod(piece.places[first], plans)
            stop = min(first + plans - plan, len(piece))
            found: RequestResult | None = None
            if all(exact[first:stop]):
                found = result.repeatable(first, stop, piece.prefill, sampled=sampled)
            if stop - first == plans:
                yield text, found
            elif (parts := self._ended(text, piece.places[first:stop], found)) is not None:
                whole = [(places, part) for places, part in parts if part is not None]
                yield text, joined(whole) if len(whole) == len(parts) else None

    def _ended(
        self, text: int, places: Sequence[int], result: RequestResult | None
    ) -> list[tuple[Sequence[int], RequestResult | None]] | None:
        """Note some sequences of a text. Returns all results of the text once all are there."""
        with self._adding:
            parts = self._begun.setdefault(text, [])
            parts.append((places, result))
            if sum(len(some) for some, _ in parts) < self.plans:
                return None
            return self._begun.pop(text)

    def _next(self, engine: PrefillEngine, max_total_tokens: int) -> Tokenized:
        if self._tokenized == len(self._texts):
            source, self._texts = self._sources.popleft()
            self._parts = source.tokenize(engine, self.prompt, self.salt, max_total_tokens)
            self._tokenized = 0
        try:
            return next(self._parts)
        except InvalidInput as error:
            rename(error, moved(error.field, self._texts))
            raise

    def _count_tokens(self, made: PrefillPart, max_total_tokens: int) -> None:
        self.computed_tokens += made.tokens
        with self._adding:
            self.timing.tokens += made.tokens
            if self.answered is not None:
                self.parts.append(made)
            if self._known and self.timing.tokens > max_total_tokens:
                raise too_many(self.timing.tokens, max_total_tokens, "inputs")

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
            piece.whole, piece.texts = whole, [number // len(plans) for number in piece.texts]
            self._last_ids = sequences[-1]
        piece.costs = [0, *accumulate(map(min, added, whole))]
