"""The queue of requests: who waits, and which sequences form the next batch.

    add -> tokenise, part by part, as batches need it -> batches; flows take turns (see fair_order.py)
        -> QueueFull (admission.py)                   -> withdraw if the client has gone

The queue decides how many engine threads run: as many as there are sequences, up to a limit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from attncache_core.reuse.kv.memory import PrefixKey
from service.batching.admission import Admission, DrainSpeed, Limits
from service.batching.fair_order import FairOrder
from service.batching.pending_request import Batch, PendingRequest, Slice
from service.errors import QueueFull

# The store is told of at most this many sequences before each batch.
_MAX_UPCOMING = 256
# Characters and tokens of prose, which count as if they had been tokenised before the first text.
_PROSE = 400.0, 100.0
# A batch is run after this many sequences were tokenised for it, also if most of their results are known.
_MAX_LOOKUPS = 512


class RequestQueue:
    """Owns the requests that wait for the engine, and counts their sequences and tokens. Thread safe.

    Tokens that neighbouring sequences of a request share count once if the engine computes them once.

    Also counts the engine threads that run, so that adding a request and the end of an engine thread's turn
    exclude each other.
    """

    # Fewer tokens are not divided among free threads, and wait while a batch is computed: small batches cost
    # more of Python's time than they save, because a batch in compiled code also uses all threads.
    min_part = 1024

    def __init__(
        self,
        limits: Limits,
        tokenize: Callable[[PendingRequest], Slice | None],
        give_up: Callable[[Batch], None],
        fail: Callable[[Batch, list[PendingRequest]], None],
        threads: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """tokenize: returns the sequences of the next part of a request that the request must compute itself.

        It returns None if the request has failed or ended. give_up: is told of sequences that nobody computes
        because their request ended before the queue had them. fail: fails the requests of a batch that will
        not be run, because forming it has failed, and the requests that may have been the reason. threads:
        the most engine threads that may run at once. clock: returns seconds.
        """
        self._limits = limits
        self._tokenize = tokenize
        self._give_up = give_up
        self._fail = fail
        self._threads = threads
        self._clock = clock
        self._lock = threading.Lock()
        # Held while a batch is formed, because forming tokenises: one thread at a time. Taken before `_lock`.
        self._forming = threading.Lock()
        self._order: FairOrder[PendingRequest] = FairOrder(limits.batch_tokens)
        self._looked_at: PendingRequest | None = None  # while a batch is formed
        self._waiting_requests = 0
        self.waiting_sequences = 0
        self.waiting_tokens = 0  # of texts that are not tokenised yet, a guess
        self._speed = DrainSpeed(threads * limits.batch_tokens)
        self._admission = Admission(limits, self._order, self._speed)
        self._characters, self._tokens = _PROSE  # of texts that were tokenised lately
        self._running = 0  # engine threads in a turn, which ends when nothing waits
        self._computing = 0  # of them, the threads that compute
        self._idle_work = 0  # of these, the threads that began an idle turn and have no batch yet

    @property
    def characters_per_token(self) -> float:
        """The mean of the texts that were tokenised lately. Long texts count more than short ones."""
        return max(0.1, self._characters / self._tokens)

    def allow_threads(self, threads: int) -> None:
        """Let at most this number of engine threads run. Threads beyond it end their turns after a batch."""
        with self._lock:
            self._threads = threads
            self._speed.round_tokens = threads * self._limits.batch_tokens

    def add(self, request: PendingRequest) -> int:
        """Queue a request. Returns the number of engine threads that the caller must start.

        Raises QueueFull if the request's sequences or tokens do not fit, or if too much comes before it.
        """
        request.guess_tokens(self.characters_per_token)
        count, tokens = request.count, request.guessed_tokens
        with self._lock:
            self._admission.require(request, self.waiting_sequences, self.waiting_tokens, self._clock())
            self._enter(request, count, tokens)
            return self._start_threads(count)

    def add_again(self, piece: Slice) -> int:
        """Queue sequences that their request expected from another, and must compute itself after all.

        Returns the number of engine threads that the caller must start.
        """
        request = piece.request
        with self._lock:
            request.waiting.append(piece)
            self._enter(request, len(piece), piece.tokens)
            # Asked after the slice was added: a request that ends now is withdrawn with it.
            has_ended = request.future.done()
            if has_ended:
                self._leave(request)
            starting = self._start_threads(len(piece))
        if has_ended:
            self._give_up([piece])
        return starting

    def start_more(self) -> int:
        """Return the number of engine threads that the caller must start, because many tokens still wait.

        When the requests came, the queue only guessed their tokens.
        """
        with self._lock:
            return self._start_threads(self.waiting_sequences)

    def late(self) -> tuple[PendingRequest, QueueFull] | None:
        """Return a request to give up, and why, if another one would not be answered in time beside it."""
        with self._lock:
            return self._admission.late(self._clock())

    def withdraw(self, request: PendingRequest) -> Batch:
        """Remove what still waits of a request that has ended. Returns its slices."""
        with self._lock:
            self._leave(request)
            # The request holds them no longer, because each of them holds the request.
            waiting = list(request.waiting)
            request.waiting.clear()
        return waiting

    def batches(self) -> Generator[Batch, None, None]:
        """Yield the batches of an engine thread's turn, until nothing waits. The caller runs each batch."""
        while batch := self._next_batch():
            try:
                yield batch
            finally:  # a thread that counts as computing for ever would keep small batches waiting
                with self._lock:
                    self._computing -= 1
                    self._note_speed(sum(piece.tokens for piece in batch))

    def upcoming(self) -> list[PrefixKey]:
        """Return how stored keys and values of the sequences that wait are looked up, soonest first."""
        found: list[PrefixKey] = []
        with self._forming:
            with self._lock:
                requests = list(self._order)
            for request in requests:
                while request.queued and not (
                    request.is_tokenized or request.waiting or request.future.done()
                ):
                    self._tokenize_part(request)
                with self._lock:
                    waiting = list(request.waiting)
                found += (key for piece in waiting for key in piece.stored_as)
                if len(found) >= _MAX_UPCOMING:
                    break
        return found[:_MAX_UPCOMING]

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

    def _next_batch(self) -> Batch:
        """Take the next batch. An empty one ends the turn of the engine thread.

        A turn ends for one of three reasons: nothing waits; too little waits beside a computed batch; more
        threads run than may.
        """
        with self._forming:
            while True:
                with self._lock:
                    goes_on = self._running <= self._threads and self._may_begin_batch()
                    free = max(1, self._threads - self._computing)
                batch: Batch = []
                try:
                    if goes_on:
                        self._form(free, batch)
                    with self._lock:
                        self._note_speed(0)
                except BaseException:
                    self._fail_formed(batch)
                    raise
                with self._lock:
                    if batch:
                        self._computing += 1
                        return batch
                    # A request that came while the last ones were looked at did not start a thread. Asked
                    # anew, because another thread may have ended its turn meanwhile.
                    goes_on = self._running <= self._threads and self._may_begin_batch()
                    if not (goes_on and self._waiting_requests):
                        self._running -= 1
                        return batch

    def _form(self, free: int, batch: Batch) -> None:
        """Add sequences to an empty batch. free: the threads that are free to share what waits.

        A batch holds at most the part of the waiting tokens that this thread would get if all free threads
        took equal parts, or `min_part` tokens if that is more, but at least one text.
        """
        with self._lock:
            # Not what comes meanwhile, or requests whose results are known would keep others waiting.
            lookups = min(_MAX_LOOKUPS, self.waiting_sequences)
        room = _Room(self._limits.batch_tokens, self._limits.batch_sequences, lookups)
        while True:
            with self._lock:
                self._looked_at = None
                request = self._looked_at = self._order.head()
                if request is None:
                    return
                if request.future.done():
                    self._leave(request)
                    continue
                if request.waiting:
                    if not batch:  # only now, because the first part of the first request is tokenised
                        room.part = max(self.min_part, math.ceil(self.waiting_tokens / free))
                    if not self._take(request, room, batch):
                        return
                if request.is_tokenized and not request.waiting:
                    self._leave(request)
                    continue
                if batch and not room.has_any:
                    return
            if not request.waiting:
                self._look_up_part(request, room)

    def _fail_formed(self, batch: Batch) -> None:
        """Fail the requests of a batch whose forming has failed, and the request that was looked at.

        Otherwise the next turn would fail on it again, and on what it comes before.
        """
        with self._lock:
            blamed = [self._looked_at] if self._looked_at is not None else [] if batch else list(self._order)
            for request in blamed:
                self._leave(request)
        self._fail(batch, blamed)

    def _take(self, request: PendingRequest, room: _Room, batch: Batch) -> bool:
        """Take what fits of a request's first slice. Returns whether the batch may have room for more.

        The caller must hold the lock.
        """
        piece = request.waiting[0]
        in_batch = piece.behind(batch)
        fitting = in_batch.fitting(room.tokens, room.texts, room.part)
        if batch and in_batch is piece and request.waiting_tokens > room.tokens:
            # If two batches divide the request, both compute what its sequences share. So the request waits
            # for the next batch, unless this batch gains more than that.
            cut = min(fitting.sequences, len(piece) - 1)
            if fitting.tokens < 2 * piece.shared(cut):
                return False
        if not fitting.sequences and not batch:
            fitting = piece.fitting(room.tokens, texts=1)
        if not fitting.sequences and not batch:
            # The sequence is too long, and no other batch has more room.
            fitting = piece.first(1)
        if not fitting.sequences:
            return False
        is_whole = fitting.sequences == len(piece)
        if is_whole:
            taken = request.waiting.popleft()
        else:
            taken = piece.part(0, fitting.sequences)
            request.waiting[0] = piece.part(fitting.sequences, len(piece))
        batch.append(taken)
        self._count(request, -len(taken), -taken.tokens)
        room.tokens -= fitting.tokens
        room.part -= fitting.tokens
        room.texts -= fitting.texts
        self._order.charge(fitting.tokens, left=request.waiting_tokens)
        return is_whole

    def _look_up_part(self, request: PendingRequest, room: _Room) -> None:
        """Tokenise the next part of a request for a batch, and charge its flow for what is known already.

        Otherwise requests whose results are all known could keep a batch from being run, and a flow from its
        turn, for as long as such requests arrive. The caller must hold `_forming`, and not the lock.
        """
        before, guessed_each = request.tokenized, request.guessed_each
        known = self._tokenize_part(request)
        made = request.tokenized - before
        room.lookups -= max(1, made)
        if known or not made:
            cost = max(1, round(guessed_each * made))
            with self._lock:
                self._order.charge(cost, left=request.waiting_tokens)
                if known:
                    self._note_speed(cost * known // made)

    def _tokenize_part(self, request: PendingRequest) -> int:
        """Tokenise the next part of a request. Returns how many of its sequences need not be computed.

        The caller must hold `_forming`, and not the lock.
        """
        before, guessed = request.tokenized, request.guessed_tokens
        piece = self._tokenize(request)
        with self._lock:
            if piece is None:
                self._leave(request)
                return request.tokenized - before
            has_ended = not request.queued
            if not has_ended:
                if len(piece):
                    request.waiting.append(piece)
                    self._note_length(request)
                added = piece.tokens + request.guessed_tokens - guessed
                self._count(request, len(piece) - (request.tokenized - before), added)
        if has_ended:
            self._give_up([piece])
        return request.tokenized - before - len(piece)

    def _note_length(self, request: PendingRequest) -> None:
        """Add a request to the mean of characters per token. The caller must hold the lock.

        Texts that were cut say nothing about the characters of a token.
        """
        if request.is_tokenized and not request.truncated:
            characters = request.source.characters * request.count / request.source.count
            self._characters = 0.9 * self._characters + characters
            self._tokens = 0.9 * self._tokens + request.tokens

    def _start_threads(self, sequences: int) -> int:
        """Return the number of engine threads that the caller must start for sequences that wait.

        If only few tokens wait, a thread that runs takes them with its next batch. The caller must hold the
        lock.
        """
        useful = sequences if self._may_divide() else int(self._running == self._idle_work)
        starting = max(0, min(self._threads - self._running, useful))
        self._running += starting
        return starting

    def _may_begin_batch(self) -> bool:
        """Return whether a free thread should begin a batch now. The caller must hold the lock."""
        return self._computing == self._idle_work or self._may_divide()

    def _may_divide(self) -> bool:
        """Return whether enough tokens wait for several batches at once. The caller must hold the lock."""
        return self.waiting_tokens >= self.min_part // max(1, self._threads - 1)

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
        # First, so that a request that cannot be removed can be removed again.
        self._order.remove(request, request.flow)
        request.queued = False
        self._waiting_requests -= 1
        self._count(request, -request.waiting_sequences, -request.waiting_tokens)

    def _count(self, request: PendingRequest, sequences: int, tokens: int) -> None:
        """Count sequences and tokens of a request that wait from now on, or no longer if negative."""
        request.waiting_sequences += sequences
        request.waiting_tokens += tokens
        self.waiting_sequences += sequences
        self.waiting_tokens += tokens
        self._order.count(request.flow, tokens)

    def _note_speed(self, tokens: int) -> None:
        """Note that tokens, which have left the queue, are computed. The caller must hold the lock."""
        self._speed.note(tokens, self._clock(), others_wait=bool(self.waiting_sequences))


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
