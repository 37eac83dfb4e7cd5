"""The queue of requests: who is admitted, who waits, and which sequences form the next batch.

    add -> tokenise, part by part, as batches need it -> batches; flows take turns (see fair_order.py)
                                                      -> withdraw if the client has gone

The queue also decides how many engine threads run: as many as there are sequences, up to a limit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attncache_core.reuse.kv.memory import Wanted
from service.batching.fair_order import FairOrder
from service.batching.pending_request import PendingRequest, PendingSequence, Share
from service.errors import QueueFull

# The store is told of at most this many sequences before each batch.
_MOST_UPCOMING = 256
_USUAL_CHARACTERS_PER_TOKEN = 4.0
# A batch is run after this many sequences were tokenised for it, also if most of their results are known.
_MOST_LOOKUPS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one batch, the queue and one request may hold."""

    batch_tokens: int
    batch_sequences: int
    queue_sequences: int
    request_tokens: int
    queue_tokens: int = 2**62


class RequestQueue:
    """Owns the requests that wait for the engine, and counts their sequences and tokens. Thread safe.

    Tokens that neighbouring sequences of a request share count once if the engine computes them once.

    Also counts the engine threads that run, so that adding a request and the end of an engine thread's turn
    exclude each other.
    """

    # Fewer tokens are not divided among free threads, and wait while a batch is computed: small batches cost
    # more of Python's time than they save, because a batch in compiled code also uses all threads.
    least_part = 1024

    def __init__(
        self,
        limits: Limits,
        tokenize: Callable[[PendingRequest], list[PendingSequence] | None],
        give_up: Callable[[list[PendingSequence]], None],
        threads: int = 1,
    ) -> None:
        """tokenize: returns the sequences of the next part of a request that the request must compute itself.

        It returns None if it has failed the request. give_up: is told of sequences that will not be computed
        because their request ended before the queue had them. threads: the most engine threads that may run
        at once.
        """
        self._limits = limits
        self._tokenize = tokenize
        self._give_up = give_up
        self._threads = threads
        self._lock = threading.Lock()
        # Held while a batch is formed, because forming tokenises: one thread at a time. Taken before `_lock`.
        self._forming = threading.Lock()
        self._order: FairOrder[PendingRequest] = FairOrder(limits.batch_tokens)
        self._waiting_requests = 0
        self._waiting_sequences = 0
        self._waiting_tokens = 0
        self._tokens_per_second = 0.0
        self._characters_per_token: float | None = None  # of the texts that were tokenised lately
        self._running = 0  # engine threads in a turn, which ends when nothing waits
        self._computing = 0  # of them, the threads that compute
        self._idle_work = 0  # of these, the threads that began an idle turn and have no batch yet

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return self._waiting_requests

    @property
    def waiting_sequences(self) -> int:
        """The number of sequences that wait for the engine."""
        return self._waiting_sequences

    @property
    def waiting_tokens(self) -> int:
        """The number of tokens that wait for the engine; of texts that are not tokenised yet, a guess."""
        return self._waiting_tokens

    def allow_threads(self, threads: int) -> None:
        """Let at most this number of engine threads run. Threads beyond it end their turns after a batch."""
        with self._lock:
            self._threads = threads

    def add(self, request: PendingRequest) -> int:
        """Queue a request. Returns the number of engine threads that the caller must start.

        Raises QueueFull if the request's sequences or tokens do not fit.
        """
        request.guess_tokens(self._characters_per_token or _USUAL_CHARACTERS_PER_TOKEN)
        count, tokens = request.count, request.guessed_tokens
        with self._lock:
            if self._waiting_sequences + count > self._limits.queue_sequences:
                raise QueueFull("too many texts are waiting", retry_after_seconds=self._seconds_to_empty())
            if self._waiting_tokens and self._waiting_tokens + tokens > self._limits.queue_tokens:
                raise QueueFull("too many tokens are waiting", retry_after_seconds=self._seconds_to_empty())
            self._enter(request, count, tokens)
            starting = max(0, min(self._threads - self._running, count))
            starting = starting if self._may_begin_batch() else 0
            self._running += starting
        return starting

    def add_again(self, request: PendingRequest, sequences: list[PendingSequence]) -> int:
        """Queue sequences that a request expected from others, and must compute itself after all.

        Returns the number of engine threads that the caller must start.
        """
        with self._lock:
            request.sequences += sequences
            self._enter(request, len(sequences), sum(own.tokens for own in sequences))
            # Asked after the sequences were added: a request that ends now is withdrawn with them.
            has_ended = request.future.done()
            if has_ended:
                self._leave(request)
            starting = int(self._running < self._threads and self._may_begin_batch())
            self._running += starting
        if has_ended:
            self._give_up(sequences)
        return starting

    def withdraw(self, request: PendingRequest) -> None:
        """Remove what still waits of a request whose client has gone; does nothing if nothing waits."""
        if request.queued:
            with self._lock:
                self._leave(request)

    def batches(self) -> Iterator[list[Share]]:
        """Yield the batches of an engine thread's turn, until nothing waits. The caller runs each batch."""
        while shares := self._next_batch():
            try:
                yield shares
            finally:  # a thread that counts as computing for ever would keep small batches waiting
                with self._lock:
                    self._computing -= 1

    def upcoming(self) -> list[Wanted]:
        """Return how stored keys and values of the sequences that wait are looked up, soonest first."""
        found: list[Wanted] = []
        with self._forming:
            with self._lock:
                requests = list(self._order)
            for request in requests:
                while not (request.is_tokenized or request.waits or request.future.done()):
                    self._tokenize_part(request)
                waiting = (own.wanted for own in request.sequences[request.taken :])
                found += (own for own in waiting if own is not None)
                if len(found) >= _MOST_UPCOMING:
                    break
        return found[:_MOST_UPCOMING]

    def begin_idle_turn(self) -> bool:
        """Begin a turn of an engine thread, without a batch, if nothing waits and no engine thread runs.

        Returns whether the turn has begun. The turn ends with `batches`, after a call of `end_idle_work`.
        """
        with self._lock:
            begins = not self._waiting_requests and not self._running
            self._running += begins
            self._computing += begins
            self._idle_work += begins
        return begins

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and at most one engine thread runs."""
        return not self._waiting_requests and self._running <= 1

    def end_idle_work(self) -> None:
        """Count the engine thread that has begun an idle turn as free for a batch."""
        with self._lock:
            self._computing -= 1
            self._idle_work -= 1

    def fail_turn(self) -> int:
        """End the turn of an engine thread that an unexpected error has ended.

        Returns the number of engine threads that the caller must start.
        """
        with self._lock:
            self._running -= 1
            starting = int(bool(self._waiting_requests) and self._running < self._threads)
            self._running += starting
        return starting

    def note_speed(self, tokens: int, seconds: float) -> None:
        """Add one batch to the mean speed, from which `add` computes when a refused client may retry."""
        with self._lock:
            # The other threads that compute are about as fast as this thread.
            speed = tokens / max(seconds, 1e-6) * max(1, self._computing)
            # A mean over about the last ten batches.
            weight = 0.1 if self._tokens_per_second else 1.0
            self._tokens_per_second += (speed - self._tokens_per_second) * weight

    def _next_batch(self) -> list[Share]:
        """Take the next batch. An empty batch ends the turn of the engine thread.

        A turn ends for one of three reasons: nothing waits; too little waits beside a computed batch; more
        threads run than may.
        """
        with self._forming:
            while True:
                with self._lock:
                    goes_on = self._running <= self._threads and self._may_begin_batch()
                    free = max(1, self._threads - self._computing)
                shares = self._form(free) if goes_on else []
                with self._lock:
                    if shares:
                        self._computing += 1
                        return shares
                    # A request that came while the last ones were looked at did not start a thread.
                    if not (goes_on and self._waiting_requests):
                        self._running -= 1
                        return []

    def _form(self, free: int) -> list[Share]:
        """Take sequences for one batch. free: the threads that are free to share what waits.

        A batch holds at most the part of the waiting tokens that this thread would get if all free threads
        took equal parts, or `least_part` tokens if that is more, but at least one text.
        """
        shares: list[Share] = []
        room = _Room(self._limits.batch_tokens, self._limits.batch_sequences, _MOST_LOOKUPS)
        while True:
            with self._lock:
                request = self._order.head()
                if request is None:
                    return shares
                if request.future.done():
                    self._leave(request)
                    continue
                if request.waits:
                    if not shares:  # only now, because the first part of the first request is tokenised
                        room.part = max(self.least_part, math.ceil(self._waiting_tokens / free))
                    if not self._take(request, room, shares):
                        # Otherwise what is left of the turn would be worth a whole batch.
                        self._order.end_turn()
                        return shares
                if request.is_tokenized and not request.waits:
                    self._leave(request)
                    continue
                if shares and not room.has_any:
                    return shares
            if not request.waits:
                self._look_up_part(request, room)

    def _take(self, request: PendingRequest, room: _Room, shares: list[Share]) -> bool:
        """Take what fits of a request. Returns whether the batch may have room for more.

        The caller must hold the lock.
        """
        fitting = request.fitting(room.tokens, room.texts, room.part)
        if fitting.stop == request.taken and not shares:
            fitting = request.fitting(room.tokens, texts=1)
        if fitting.stop == request.taken and not shares:
            # The sequence is too long, and no other batch has more room.
            fitting = request.first_waiting()
        if fitting.stop > request.taken:
            shares.append(Share(request, request.sequences[request.taken : fitting.stop]))
            added = sum(own.added for own in shares[-1].sequences)
            self._count(request, request.taken - fitting.stop, -added)
            request.taken = fitting.stop
            room.tokens -= fitting.tokens
            room.part -= fitting.tokens
            room.texts -= fitting.texts
            self._order.charge(fitting.tokens)
        return not request.waits

    def _look_up_part(self, request: PendingRequest, room: _Room) -> None:
        """Tokenise the next part of a request for a batch, and charge its flow for what is known already.

        Otherwise requests whose results are all known could keep a batch from being run, and a flow from its
        turn, for as long as such requests arrive. The caller must hold `_forming`, and not the lock.
        """
        before, waiting = request.tokenized, len(request.sequences)
        guessed = request.guessed_tokens
        self._tokenize_part(request)
        known = request.tokenized - before - (len(request.sequences) - waiting)
        room.lookups -= max(1, request.tokenized - before)
        if known or request.tokenized == before:
            with self._lock:
                self._order.charge(max(1, guessed - request.guessed_tokens))

    def _tokenize_part(self, request: PendingRequest) -> None:
        """Tokenise the next part of a request. The caller must hold `_forming`, and not the lock."""
        before, guessed = request.tokenized, request.guessed_tokens
        sequences = self._tokenize(request)
        with self._lock:
            if sequences is None:
                self._leave(request)
                return
            has_ended = not request.queued
            if not has_ended:
                request.sequences += sequences
                self._note_length(request)
                added = sum(own.added for own in sequences) + request.guessed_tokens - guessed
                self._count(request, len(sequences) - (request.tokenized - before), added)
        if has_ended:
            self._give_up(sequences)

    def _note_length(self, request: PendingRequest) -> None:
        """Add a request to the mean of characters per token. The caller must hold the lock."""
        if request.sequences and request.is_tokenized:
            tokens = max(1, sum(len(own.ids) for own in request.sequences)) / len(request.sequences)
            own = max(0.1, request.source.characters / request.source.count / tokens)
            before = self._characters_per_token
            self._characters_per_token = own if before is None else before + 0.1 * (own - before)

    def _may_begin_batch(self) -> bool:
        """Return whether a free thread should begin a batch now. The caller must hold the lock."""
        if self._computing == self._idle_work:
            return True
        return self._waiting_tokens >= self.least_part // max(1, self._threads - 1)

    def _enter(self, request: PendingRequest, sequences: int, tokens: int) -> None:
        if not request.queued:
            request.queued = True
            self._order.add(request, request.flow)
            self._waiting_requests += 1
        self._count(request, sequences, tokens)

    def _leave(self, request: PendingRequest) -> None:
        """Remove a request and what still waits of it. The caller must hold the lock."""
        if not request.queued:
            return
        request.queued = False
        self._order.remove(request, request.flow)
        self._waiting_requests -= 1
        self._count(request, -request.waiting_sequences, -request.waiting_tokens)

    def _count(self, request: PendingRequest, sequences: int, tokens: int) -> None:
        """Count sequences and tokens of a request that wait from now on, or no longer if negative."""
        request.waiting_sequences += sequences
        request.waiting_tokens += tokens
        self._waiting_sequences += sequences
        self._waiting_tokens += tokens

    def _seconds_to_empty(self) -> int:
        if not self._tokens_per_second:
            return 1
        return max(1, math.ceil(self._waiting_tokens / self._tokens_per_second))


@dataclass(slots=True)
class _Room:
    """What a batch that is formed has room for."""

    tokens: int
    texts: int
    lookups: int  # sequences that may be tokenised for the batch
    part: int = 0  # tokens that a text which begins may have

    @property
    def has_any(self) -> bool:
        return self.tokens > 0 and self.texts > 0 and self.part > 0 and self.lookups > 0
