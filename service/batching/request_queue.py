"""The queue of requests: who is admitted, who waits, and which sequences form the next batch.

admit -> (tokenize) -> add -> batches, oldest first
      -> release if tokenising failed
                           -> withdraw if the client has gone

The queue also decides how many engine threads run: as many as there are sequences, up to a limit.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from attncache_core.reuse.kv.memory import Wanted
from service.batching.pending_request import PendingRequest, Share
from service.errors import QueueFull

# The store is told of at most this many sequences before each batch.
_MOST_UPCOMING = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one batch, the queue and one request may hold."""

    batch_tokens: int
    batch_sequences: int
    queue_sequences: int
    request_tokens: int


class RequestQueue:
    """Owns the requests that wait for the engine, and counts their sequences and tokens. Thread safe.

    Tokens that neighbouring sequences of a request share count once if the engine computes them once.

    Also counts the engine threads that run, so that adding a request and the end of an engine thread's turn
    exclude each other.
    """

    # Fewer tokens are not divided among free threads, and wait while a batch is computed: small batches cost
    # more of Python's time than they save, because a batch in compiled code also uses all threads.
    least_part = 1024

    def __init__(self, limits: Limits, threads: int = 1) -> None:
        """threads: the most engine threads that may run at once."""
        self._limits = limits
        self._threads = threads
        self._lock = threading.Lock()
        self._requests: deque[PendingRequest] = deque()
        self._waiting_sequences = 0  # admitted and not yet taken, tokenised or not
        self._waiting_tokens = 0
        self._tokens_per_second = 0.0
        self._running = 0  # engine threads in a turn, which ends when nothing waits
        self._computing = 0  # of them, the threads that compute
        self._idle_work = 0  # of these, the threads that began an idle turn and have no batch yet

    def __len__(self) -> int:
        """Return the number of tokenised requests that wait."""
        return len(self._requests)

    @property
    def waiting_sequences(self) -> int:
        """The number of sequences that wait for the engine."""
        return self._waiting_sequences

    def admit(self, count: int) -> None:
        """Reserve room for the sequences of a request. Raises QueueFull if they do not fit."""
        with self._lock:
            if self._waiting_sequences + count > self._limits.queue_sequences:
                raise QueueFull("too many texts are waiting", retry_after_seconds=self._seconds_to_empty())
            self._waiting_sequences += count

    def release(self, request: PendingRequest) -> None:
        """Give up the room of a request that was admitted and will not be added."""
        with self._lock:
            self._waiting_sequences -= request.count

    def allow_threads(self, threads: int) -> None:
        """Let at most this number of engine threads run. Threads beyond it end their turns after a batch."""
        with self._lock:
            self._threads = threads

    def add(self, request: PendingRequest) -> int:
        """Queue a tokenised request. Returns the number of engine threads that the caller must start."""
        with self._lock:
            self._waiting_tokens += sum(request.added_tokens)
            self._requests.append(request)
            starting = max(0, min(self._threads - self._running, len(request.sequences)))
            starting = starting if self._may_begin_batch() else 0
            self._running += starting
        return starting

    def withdraw(self, request: PendingRequest) -> None:
        """Remove what still waits of a request whose client has gone; does nothing if nothing waits."""
        with self._lock:
            if request.taken < request.count and request in self._requests:
                self._leave(request, request.count)
                self._requests.remove(request)

    def batches(self) -> Iterator[list[Share]]:
        """Yield the batches of an engine thread's turn, until nothing waits. The caller runs each batch."""
        while shares := self._take_batch():
            try:
                yield shares
            finally:  # a thread that counts as computing for ever would keep small batches waiting
                with self._lock:
                    self._computing -= 1

    def upcoming(self) -> list[Wanted]:
        """Return how stored keys and values of the sequences that wait are looked up, soonest first."""
        with self._lock:
            waiting = (own for request in self._requests for own in request.wanted[request.taken :])
            return list(islice((own for own in waiting if own is not None), _MOST_UPCOMING))

    def begin_idle_turn(self) -> bool:
        """Begin a turn of an engine thread, without a batch, if nothing waits and no engine thread runs.

        Returns whether the turn has begun. The turn ends with `batches`, after a call of `end_idle_work`.
        """
        with self._lock:
            begins = not self._requests and not self._running
            self._running += begins
            self._computing += begins
            self._idle_work += begins
        return begins

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and at most one engine thread runs."""
        return not self._requests and self._running <= 1

    def end_idle_work(self) -> None:
        """Count the engine thread that has begun an idle turn as free for a batch."""
        with self._lock:
            self._computing -= 1
            self._idle_work -= 1

    def _may_begin_batch(self) -> bool:
        """Return whether a free thread should begin a batch now. The caller must hold the lock."""
        if self._computing == self._idle_work:
            return True
        return self._waiting_tokens >= self.least_part // max(1, self._threads - 1)

    def _take_batch(self) -> list[Share]:
        """Take the next batch, oldest requests first.

        A batch holds at most the part of the waiting tokens that this thread would get if all free threads
        took equal parts, or `least_part` tokens if that is more, but at least one text. An empty batch ends
        the turn of the engine thread, for one of three reasons: nothing waits; too little waits beside a
        computed batch; more threads run than may.
        """
        shares: list[Share] = []
        tokens_left, texts_left = self._limits.batch_tokens, self._limits.batch_sequences
        with self._lock:
            if self._running > self._threads or not self._may_begin_batch():
                self._running -= 1
                return shares
            free = max(1, self._threads - self._computing)
            part_left = max(self.least_part, math.ceil(self._waiting_tokens / free))
            while self._requests:
                request = self._requests[0]
                start = request.taken
                if request.future.done():
                    self._leave(request, request.count)
                    self._requests.popleft()
                    continue
                fitting = request.fitting(tokens_left, texts_left, part_left)
                if fitting.stop == start and not shares:
                    fitting = request.fitting(tokens_left, texts=1)
                if fitting.stop == start and not shares:
                    # The sequence is too long, and no other batch has more room.
                    fitting = request.first_waiting()
                if fitting.stop > start:
                    shares.append(Share(request, start, fitting.stop))
                    self._leave(request, fitting.stop)
                    tokens_left -= fitting.tokens
                    part_left -= fitting.tokens
                    texts_left -= fitting.texts
                if fitting.stop < len(request.sequences):
                    break
                self._requests.popleft()
            if shares:
                self._computing += 1
            else:
                self._running -= 1
        return shares

    def note_speed(self, tokens: int, seconds: float) -> None:
        """Add one batch to the mean speed, from which `admit` computes when a refused client may retry."""
        with self._lock:
            # The other threads that compute are about as fast as this thread.
            speed = tokens / max(seconds, 1e-6) * max(1, self._computing)
            # A mean over about the last ten batches.
            weight = 0.1 if self._tokens_per_second else 1.0
            self._tokens_per_second += (speed - self._tokens_per_second) * weight

    def _seconds_to_empty(self) -> int:
        if not self._tokens_per_second:
            return 1
        return max(1, math.ceil(self._waiting_tokens / self._tokens_per_second))

    def _leave(self, request: PendingRequest, stop: int) -> None:
        """Count sequences[taken:stop] as taken. The caller must hold the lock."""
        self._waiting_sequences -= stop - request.taken
        self._waiting_tokens -= sum(request.added_tokens[request.taken : stop])
        request.taken = stop
